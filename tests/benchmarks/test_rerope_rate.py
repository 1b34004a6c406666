"""The benchmark of moves, from the command line to the JSON, on pools far too small to say anything."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the torch tier needs torch")

from benchmarks import rerope_rate  # noqa: E402
from benchmarks._machine import last_cache_bytes  # noqa: E402
from benchmarks._pools import MODELS, Case, Copies, Pool, cases  # noqa: E402
from spanflow.kernels import build  # noqa: E402
from spanflow.kernels.slots import cut  # noqa: E402

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def test_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if not any(map(shutil.which, build._COMPILERS)):
        pytest.skip(f"the CPU kernel needs a C++ compiler: one of {', '.join(build._COMPILERS)}")
    monkeypatch.setattr(rerope_rate, "PLANNED", (100, 200))
    path = tmp_path / "rate.json"
    rerope_rate.main(["--quick", "--half-mib", "64", "--json", str(path)])
    read = json.loads(path.read_text())
    assert {"cpu_contiguous", "cpu_scattered", "plan_100k_ms"} <= read["figures"].keys()
    rows = [row for row in read["rows"] if "share" in row]
    assert {row["tokens"] for row in rows} >= {16, 512}
    assert {row["slots"] for row in rows} == {"contiguous", "scattered"}
    for row in rows:
        assert row["share_low"] <= row["share"] <= row["share_high"]
        num_bytes = 2 * row["tokens"] * row["spans"] * MODELS[row["model"]].bytes_per_token(getattr(torch, row["type"]))
        assert row["gb_per_s"] == pytest.approx(num_bytes / row["ms"] / 1e6, rel=0.01, abs=0.01)
    out = capsys.readouterr().out
    for part in ("largest cache", "tokens/ms", "us a move", "cpu_scattered"):
        assert part in out
    assert "host ms" not in out


def test_figures_are_the_worst_of_what_counts() -> None:
    row = {"by": "kernel", "slots": "contiguous", "tokens": 512, "share": 0.9, "model": "8B", "tokens_per_ms": 7.0}
    others = [{"tokens": 16, "share": 0.1}, {"by": "torch", "share": 0.1}, {"share": 0.8}, {"slots": "scattered"}]
    figures = rerope_rate.move_figures([row, *(row | other for other in others)], "cpu")
    assert figures["cpu_contiguous"] == 0.8
    assert figures["cpu_scattered"] == 0.9
    assert figures["cpu_contiguous_8b_tokens_per_ms"] == 7.0


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("layout", ["transposed", "token-major"])
def test_batches_use_the_whole_pool_before_a_part_again(layout: str, scattered: bool) -> None:
    pool = Pool(MODELS["135M"], torch.bfloat16, layout, 8 << 20, CPU)
    case = Case("135M", torch.bfloat16, layout, scattered, 50, 2)
    waves = pool.waves(case, random.Random(1))
    seen: set[int] = set()
    for _ in range(pool.num_blocks // (2 * (-(-55 // pool.block_size)))):
        pieces = cut(next(waves), pool.block_size, 2 * pool.num_blocks)
        assert pieces.num_tokens == case.num_tokens
        targets = set(pieces.pieces["target"].tolist())
        assert min(targets) >= pool.num_blocks > max(pieces.pieces["source"])
        assert not targets & seen
        seen |= targets
    assert pool.views[0].keys.shape == (2 * pool.num_blocks, 3, pool.block_size, 64)
    with pytest.raises(ValueError, match="there are"):
        next(pool.waves(Case("135M", torch.bfloat16, layout, scattered, 8192, 1), random.Random(1)))


def test_copies_copy_all_that_they_are_timed_for() -> None:
    for name in Copies(torch.empty(8)).ways():
        storage = torch.arange(4096, dtype=torch.float32)
        copies = Copies(storage)
        copies.ways()[name](8000)
        copies.close()
        assert torch.equal(storage[2048:4048], storage[:2000])
        assert torch.equal(storage[4048:], torch.arange(4048, 4096, dtype=torch.float32))


def test_a_gpu_is_measured_in_the_layout_of_gpus() -> None:
    found = cases(torch.device("cuda"), quick=False)
    assert {case.layout for case in found} == {"token-major"}
    assert {case.length for case in found if case.model == "8B"} >= {16, 512, 8192}
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="there is none here"):
            rerope_rate.main(["--device", "cuda"])


def test_the_largest_cache(tmp_path: Path) -> None:
    assert last_cache_bytes(tmp_path) == 0
    for place, size in enumerate(("48K", "2048K", "260M")):
        (tmp_path / f"index{place}").mkdir()
        (tmp_path / f"index{place}" / "size").write_text(size + "\n")
    assert last_cache_bytes(tmp_path) == 260 << 20
