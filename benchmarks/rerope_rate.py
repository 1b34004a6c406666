"""How fast KV is moved: tokens a millisecond, beside copies of as many bytes; and what planning the moves takes.

    python -m benchmarks.rerope_rate [--quick] [--json FILE] [--device cuda]

Each round measures the moves and each way to copy as many bytes, on as many threads, in one pool that is far larger
than the caches; each takes memory that was not touched for as long as the pool is large. The share is the time of the
fastest way to copy over that of the moves.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import torch

from benchmarks._budget import Budget
from benchmarks._machine import last_cache_bytes, this_machine, versions
from benchmarks._measure import Spread, ratio_spread, spread
from benchmarks._options import bare_parser
from benchmarks._pools import MODELS, Case, Copies, Pool, cases, timer
from benchmarks._report import Report, Row, text_table
from spanflow.cidra.moves import Moves
from spanflow.cidra.plan import plan_moves
from spanflow.kernels.cuda import CudaRunner
from spanflow.kernels.dispatch import best_runner
from spanflow.kernels.runner import Runner, TorchRunner

COLUMNS = {
    "model": "model",
    "type": "type",
    "layout": "layout of K",
    "slots": "slots",
    "tokens": "tokens",
    "spans": "spans",
    "by": "moved by",
    "tokens_per_ms": "tokens/ms",
    "gb_per_s": "GB/s",
    "copy_gb_per_s": "copied GB/s",
    "share": "share",
    "share_low": "least",
    "share_high": "most",
    "best_copy": "fastest copy",
    "host_ms": "host ms",
}
PLAN_COLUMNS = {"moves": "moves", "kind": "kind", "waves": "waves", "plan_ms": "plan ms", "us_per_move": "us a move"}
#: The least size of either half of a pool, and how many times the processor's largest cache fits into it at least.
HALF_BYTES, CACHES = {"cpu": 1 << 30, "cuda": 4 << 30}, 4
#: How many moves are planned.
PLANNED = (12_500, 25_000, 50_000, 100_000)
QUICK_SECONDS = 100.0
#: Spans of at least so many tokens count for the figures.
LONG = 512


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    options = bare_parser("rerope_rate", __doc__.splitlines()[0], repeats=15)
    options.add_argument("--device", default="cpu", help="where the KV is: cpu, or cuda and its number")
    options.add_argument("--half-mib", type=int, metavar="MIB", help="size of either half of a pool, for tests")
    asked = options.parse_args(arguments)
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda needs an NVIDIA GPU and a CUDA build of torch; there is none here")
    cache = last_cache_bytes()
    half = asked.half_mib << 20 if asked.half_mib else max(HALF_BYTES[device.type], CACHES * cache)
    sizes = {
        "half of a pool": f"{half / (1 << 20):.0f} MiB",
        "largest cache": f"{cache / (1 << 20):.0f} MiB",
        "threads": torch.get_num_threads(),
        "date": date.today().isoformat(),
    }
    if device.type == "cuda":
        sizes["GPU"] = torch.cuda.get_device_name(device)
    report = Report("rerope_rate", this_machine(), versions(), asked.seed, sizes)
    print(report.heading(), flush=True)
    budget = Budget(QUICK_SECONDS if asked.quick else None)
    with tempfile.TemporaryDirectory() as kernels:
        report.rows += measure_moves(asked, device, half, Path(kernels), budget)
    columns = {key: title for key, title in COLUMNS.items() if any(key in row for row in report.rows)}
    print(text_table(columns, report.rows), flush=True)
    report.figures |= move_figures(report.rows, device.type)
    if device.type == "cpu":
        plans = measure_plans(asked.seed, 3 if asked.quick else 7)
        print("\n" + text_table(PLAN_COLUMNS, plans))
        report.rows += plans
        report.figures |= plan_figures(plans)
    report.notes += notes(device.type)
    print(report.footing())
    if asked.json is not None:
        report.write(asked.json)


def measure_moves(
    asked: argparse.Namespace, device: torch.device, half: int, kernels: Path, budget: Budget
) -> list[Row]:
    """A row for each case that there was time for."""
    rng = random.Random(asked.seed)
    rows: list[Row] = []
    pool: Pool | None = None
    made_for: object = None
    for case in cases(device, quick=asked.quick):
        if case.num_bytes > half // 2 or not budget.allows("case"):
            continue
        begun = budget.elapsed
        if made_for != (case.model, case.dtype, case.layout):
            pool = None
            gc.collect()  # before the next one is made
            pool = Pool(MODELS[case.model], case.dtype, case.layout, half, device)
            made_for = (case.model, case.dtype, case.layout)
        assert pool is not None
        runners: list[Runner] = [best_runner(pool.views, kernels)]
        if case.model == "135M" and case.layout == "transposed" and case.length == 2048:
            runners.append(TorchRunner(pool.views))
        for runner in runners:
            rows.append(measure(case, pool, runner, device, 3 if asked.quick else asked.repeats, rng))
        budget.note("case", begun)
    return rows


def measure(case: Case, pool: Pool, runner: Runner, device: torch.device, repeats: int, rng: random.Random) -> Row:
    """One row: a case, by one runner."""
    clock, copies, waves = timer(device), Copies(pool.storage), pool.waves(case, rng)
    ways = copies.ways()
    moved: list[list[float]] = []
    prepared: list[float] = []
    copied: dict[str, list[list[float]]] = {name: [] for name in ways}
    for round_number in range(repeats + 1):
        times = {name: clock(lambda copy=copy: copy(case.num_bytes)) for name, copy in ways.items()}  # type: ignore[misc]
        wave = next(waves)
        begun = time.perf_counter()
        # On a GPU the host describes a batch while the one before it runs.
        run = runner.prepared(wave) if isinstance(runner, CudaRunner) else lambda wave=wave: runner.run(wave)
        described = 1e3 * (time.perf_counter() - begun)
        ran = clock(run)
        if round_number:  # the first one loads code and wakes threads
            moved.append([ran])
            prepared.append(described)
            for name, taken in times.items():
                copied[name].append([taken])
    copies.close()
    best = min(copied, key=lambda name: spread([taken for (taken,) in copied[name]]).median)
    share = ratio_spread(copied[best], moved)
    ms = spread([taken for (taken,) in moved])
    copy_ms = spread([taken for (taken,) in copied[best]])
    return {
        "model": case.model,
        "type": str(case.dtype).removeprefix("torch."),
        "layout": case.layout,
        "slots": "scattered" if case.scattered else "contiguous",
        "tokens": case.length,
        "spans": case.num_spans,
        "by": "torch" if isinstance(runner, TorchRunner) else "kernel",
        "ms": round(ms.median, 4),
        "tokens_per_ms": round(case.num_tokens / ms.median, 1),
        "gb_per_s": _rate(case, ms),
        "copy_gb_per_s": _rate(case, copy_ms),
        "share": round(share.median, 3),
        "share_low": round(share.low, 3),
        "share_high": round(share.high, 3),
        "best_copy": best,
    } | ({"host_ms": round(spread(prepared).median, 3)} if isinstance(runner, CudaRunner) else {})


def _rate(case: Case, ms: Spread) -> float:
    """Read and written, in GB/s."""
    return round(2 * case.num_bytes / ms.median / 1e6, 2)


def move_figures(rows: Sequence[Row], device: str) -> dict[str, float]:
    """The least share of long spans, for contiguous and for scattered slots, and how fast the 8B shape is moved."""
    figures = {}
    ours = [row for row in rows if row["by"] == "kernel"]
    for slots in ("contiguous", "scattered"):
        long = [row for row in ours if row["slots"] == slots and int(row["tokens"] or 0) >= LONG]
        if long:
            figures[f"{device}_{slots}"] = min(float(row["share"] or 0) for row in long)
        largest = [float(row["tokens_per_ms"] or 0) for row in long if row["model"] == "8B"]
        if largest:
            figures[f"{device}_{slots}_8b_tokens_per_ms"] = max(largest)
    return figures


def _apart(count: int, rng: np.random.Generator) -> Moves:
    blocks = rng.permutation(2 * count) * 32
    return Moves(blocks[:count], blocks[count:], np.full(count, 32), np.arange(count) % 500)


def _some_wait(count: int, rng: np.random.Generator) -> Moves:
    """One in forty is written where another one is read."""
    moves = _apart(count, rng)
    few = count // 40
    moves.target[few : 2 * few] = moves.source[:few]
    return moves


def _shifted_in_place(count: int, rng: np.random.Generator) -> Moves:
    """Each by three tokens inside its own blocks: the planner looks at each token."""
    del rng
    return Moves(np.arange(count) * 64 + 3, np.arange(count) * 64, np.full(count, 32), np.full(count, -3))


def _permuted(count: int, rng: np.random.Generator) -> Moves:
    """Blocks that trade places, in cycles of any length."""
    return Moves(rng.permutation(count) * 32, np.arange(count) * 32, np.full(count, 32), np.full(count, 1))


PLANS = {
    "apart": _apart,
    "some wait": _some_wait,
    "blocks permuted": _permuted,
    "shifted in place": _shifted_in_place,
}


def measure_plans(seed: int, repeats: int) -> list[Row]:
    """Milliseconds to plan 12,500 to 100,000 moves of a block each."""
    rows: list[Row] = []
    for kind, make in PLANS.items():
        for count in PLANNED:
            moves = make(count, np.random.default_rng(seed))
            times = []
            for _ in range(repeats):
                begun = time.perf_counter()
                plan = plan_moves(moves, 1 << 40, 1 << 14)
                times.append(1e3 * (time.perf_counter() - begun))
            ms = spread(times).median
            rows.append(
                {
                    "moves": count,
                    "kind": kind,
                    "waves": len(plan.waves),
                    "plan_ms": round(ms, 2),
                    "us_per_move": round(1e3 * ms / count, 3),
                }
            )
    return rows


def plan_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Planning 100,000 moves of which some wait, and how time a move grows from 12,500 of them on."""
    figures = {}
    for kind in PLANS:
        few, *_, many = (row for row in rows if row["kind"] == kind)
        name = kind.replace(" ", "_")
        figures[f"plan_100k_ms_{name}"] = float(many["plan_ms"] or 0)
        figures[f"plan_growth_{name}"] = float(many["us_per_move"] or 0) / float(few["us_per_move"] or 1)
    return {"plan_100k_ms": figures["plan_100k_ms_some_wait"]} | figures


def notes(device: str) -> list[str]:
    """What to know about the figures."""
    common = [
        f"{device}_contiguous and {device}_scattered are the least shares of the kernel's rows with spans of {LONG} "
        "tokens and more; share is the time of the fastest way to copy over that of the moves, in rounds, GB/s counts "
        "what is read and what is written",
        "scattered: blocks in random order on both sides, sources 5 tokens further in their blocks than targets",
    ]
    if device != "cpu":
        return [
            *common,
            "times are those of the GPU; host ms is what the host takes to describe a batch and to upload that, which "
            "it does while the GPU is busy with something else",
        ]
    return [
        *common,
        "memcpy is that of the C library; on virtual machines the largest cache is often shared with others, so a "
        "pool is several times as large as what is reported",
        "plan_growth_* is the time a move at 100,000 moves over that at 12,500: 1 is linear; plan_100k_ms is that of "
        "moves one in forty of which waits for another",
    ]


if __name__ == "__main__":
    main()
