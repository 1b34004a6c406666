"""Time to first token of a judge that reads candidates which the same model has just written.

    python -m benchmarks.judge_ttft [--quick] [--json FILE] [--plot FILE.png]

Stock vLLM with prefix caching, which computes all candidates again, against ours, which takes their KV over, with and
without repair, and without the leases that keep a candidate's last tokens.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence

from benchmarks._budget import Budget
from benchmarks._engines import Pair, say, started_pair
from benchmarks._judge import ALL, LARGEST_ONLY, QUICK, Candidates, Contestant, Record, run_round
from benchmarks._judge_report import COLUMNS, figures, notes, panels, rows
from benchmarks._machine import this_machine, versions
from benchmarks._options import check_plot, parser, positive, whole_numbers
from benchmarks._plot import draw
from benchmarks._report import Report, text_table

FANOUTS = (1, 2, 4, 8, 16, 24)
QUICK_FANOUTS = (1, 8, 24)
QUICK_SECONDS = 100.0
TEMPERATURES = (0.8, 0.0)
#: Of a candidate's turn so many tokens are not sampled.
_TURN_TOKENS = 12


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    options = parser("judge_ttft", (__doc__ or "").partition("\n")[0], repeats=5)
    options.add_argument("--fanouts", type=whole_numbers, help="numbers of candidates; 1,2,4,8,16,24 by default")
    options.add_argument(
        "--outers", type=positive, default=2, help="outer prompts a round and fan-out (1 where it is quick)"
    )
    options.add_argument("--tokens", type=positive, default=70, help="tokens of a candidate, at most")
    options.add_argument("--kv-gib", type=float, default=1.0, help="KV cache of each engine")
    asyncio.run(_main(options.parse_args(arguments)))


async def _main(options: argparse.Namespace) -> None:
    check_plot(options.plot)
    budget = Budget(QUICK_SECONDS if options.quick else None)
    fanouts: tuple[int, ...] = options.fanouts or (QUICK_FANOUTS if options.quick else FANOUTS)
    who = QUICK if options.quick else ALL
    num_outers = 1 if options.quick else options.outers
    sizes = {
        "fanouts": " ".join(map(str, fanouts)),
        "candidate_tokens_at_most": options.tokens,
        "rounds_at_most": options.repeats,
        "outers_per_round": num_outers,
        "kv_gib": options.kv_gib,
        "cores": options.cores,
    }
    report = Report("judge_ttft", this_machine(), versions(), options.seed, sizes)
    print(report.heading(), flush=True)
    records: dict[float, dict[tuple[int, Contestant], Record]] = {}
    for temperature in TEMPERATURES:
        keys = [(fanout, one) for fanout in fanouts for one in who if one not in LARGEST_ONLY or fanout == max(fanouts)]
        records[temperature] = {key: Record() for key in keys}
    made = {temperature: Candidates() for temperature in TEMPERATURES}
    window = max(fanouts) * (options.tokens + _TURN_TOKENS) + 256
    engine_options = {"max_model_len": window, "kv_cache_gib": options.kv_gib}
    async with started_pair(options.model, cores=options.cores, **engine_options) as pair:
        await _warm_up(pair, options.seed)
        for number in range(options.repeats):
            for temperature in TEMPERATURES:
                begun = budget.elapsed
                if not budget.allows(str(temperature)):
                    continue
                await run_round(
                    pair,
                    number,
                    temperature,
                    records[temperature],
                    made[temperature],
                    fanouts=fanouts,
                    who=who,
                    num_outers=num_outers,
                    max_tokens=options.tokens,
                    seed=options.seed,
                )
                budget.note(str(temperature), begun)
                say(f"temperature {temperature:g}: round {number + 1} took {budget.elapsed - begun:.0f} s")
    report.rows, report.figures = rows(records, made), figures(records)
    report.notes = [*filter(None, [pair.note]), *notes(records, made)]
    print(text_table(COLUMNS, report.rows))
    print(report.footing())
    if options.json:
        report.write(options.json)
    if options.plot:
        draw(options.plot, f"{report.benchmark}: {report.machine.cpu}", panels(records))


async def _warm_up(pair: Pair, seed: int) -> None:
    """Each kind of step once: a round of two short candidates that nobody counts."""
    keys = [(2, one) for one in ALL]
    uncounted = {key: Record() for key in keys}
    await run_round(
        pair, 999, 0.8, uncounted, Candidates(), fanouts=(2,), who=ALL, num_outers=1, max_tokens=24, seed=seed + 1
    )


if __name__ == "__main__":
    main()
