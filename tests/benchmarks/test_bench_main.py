"""Both benchmarks from the command line to the JSON, on simulated engines."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks import judge_ttft, rag_ttft
from benchmarks._engines import Pair

Started = Callable[..., AbstractAsyncContextManager[Pair]]


@pytest.fixture
def started(make_pair: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Simulated engines for both; what they were asked to be started with."""
    options: dict[str, Any] = {}

    @asynccontextmanager
    async def start(model: str, **given: Any) -> AsyncIterator[Pair]:
        options.update(given, model=model)
        yield await make_pair()

    for module in (rag_ttft, judge_ttft):
        monkeypatch.setattr(module, "started_pair", start)
    return options


def test_retrieval(started: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rag.json"
    rag_ttft.main(["--grid", "600/2,1069/4", "--repeats", "2", "--seed", "4", "--json", str(path)])
    read = json.loads(path.read_text())
    assert read["seed"] == 4
    assert {"hit_1k_moved", "hit_1k_default", "miss_1k", "moves_share_1k", "hit_1k_head", "exact_1k"} <= read[
        "figures"
    ].keys()
    assert {row["label"] for row in read["rows"]} == {"600", "1k"}
    assert all(row["count"] in (2, 2 * min(3, row["num_documents"] - 1)) for row in read["rows"] if "count" in row)
    out = capsys.readouterr().out
    for part in ("machine ", "versions ", "seed      4", "repair(32) (default)", "kept", "hit_1k_moved"):
        assert part in out
    assert started["max_model_len"] > 1069 + 200
    assert started["model"] == "smollm2"


def test_retrieval_quick(started: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rag.json"
    rag_ttft.main(["--quick", "--repeats", "1", "--json", str(path)])
    figures = json.loads(path.read_text())["figures"]
    assert {"hit_1k_moved", "hit_2k_moved", "hit_1k_default", "hit_2k_default"} <= figures.keys()
    assert {"miss_1k", "miss_2k", "moves_share_2k"} <= figures.keys()


def test_judges_quick(started: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "judge.json"
    judge_ttft.main(["--quick", "--repeats", "1", "--json", str(path)])
    figures = json.loads(path.read_text())["figures"]
    assert {"outer_24_t08", "outer_24_t0", "outer_worst_t0"} <= figures.keys()
    assert "temperature 0.8: candidates of" in capsys.readouterr().out
    assert started["max_model_len"] >= 24 * 70


def test_judges_of_all_fanouts(started: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "judge.json"
    judge_ttft.main(["--repeats", "1", "--outers", "1", "--tokens", "20", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert {row["fanout"] for row in rows} == {1, 2, 4, 8, 16, 24}
    assert {row["temperature"] for row in rows} == {0.0, 0.8}
