"""The compile benchmark measures trees of the sizes that it says, and adds its figures up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compile_cost
from spanflow.ir.verify import verify
from spanflow.ir.walk import preorder
from spanflow.optimizer.passes import DEFAULT
from spanflow.optimizer.pipeline import optimise


@pytest.mark.parametrize("shape", compile_cost.SHAPES, ids=lambda shape: shape.__name__)
@pytest.mark.parametrize("size", [compile_cost.SMALL, compile_cost.LARGE])
def test_sizes(shape: compile_cost.Shape, size: int) -> None:
    root = shape(size)
    verify(root)
    assert 0.9 * size <= sum(1 for _ in preorder(root)) <= size


def test_shapes_are_what_they_are_said_to_be() -> None:
    steps = {shape.__name__: len(optimise(shape(1_000)).steps) for shape in compile_cost.SHAPES}
    assert {name for name, number in steps.items() if number == 0} == {
        "judge",
        "judges",
        "documents",
        "operands",
        "deep",
    }
    assert {name for name, number in steps.items() if number == 1} == {"exact", "nested", "tree"}
    assert steps["bare"] == 496
    deepest = max(path.count("operands") for path, _ in preorder(compile_cost.deep(10_000)))
    assert deepest >= 4_990


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cost, "SMALL", 200)
    monkeypatch.setattr(compile_cost, "LARGE", 400)
    compile_cost.main(["--repeats", "1", "--json", str(tmp_path / "cost.json")])
    printed = capsys.readouterr().out
    read = json.loads((tmp_path / "cost.json").read_text())
    assert len(read["rows"]) == 2 * len(compile_cost.SHAPES)
    assert "most of it in" in printed
    assert all({f"{each.name}_ms" for each in DEFAULT} | {"verify_ms"} <= row.keys() for row in read["rows"])
    figures = read["figures"]
    names = [shape.__name__ for shape in compile_cost.SHAPES]
    assert figures["optimise_10k_ms"] == figures["optimise_10k_ms_judge"]
    assert figures["optimise_10k_ms_worst"] == max(figures[f"optimise_10k_ms_{name}"] for name in names)
    assert figures["growth"] == max(figures[f"growth_{name}"] for name in names)
