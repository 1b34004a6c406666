"""The examples: their queries load and run as they stand, and their folders start the demos."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_engine import Script, register
from typer.testing import CliRunner

from spanflow import Session
from spanflow.cli.app import app
from spanflow.cli.queries import load_query

pytest.importorskip("bm25s", reason="the retrieval example needs bm25s")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    register(monkeypatch)
    return Script(window=10_000)


def test_there_are_two() -> None:
    assert sorted(path.parent.name for path in EXAMPLES.glob("*/query.py")) == ["judge", "rag"]


def test_the_retrieval_lowers_to_a_span_for_each_document(script: Script) -> None:
    with Session("m", engine="scripted", script=script) as session:
        query = load_query(EXAMPLES / "rag" / "query.py")
        (generation,) = session.explain(query).generations
        result = session.run(query)
    assert [span.kind for span in generation.spans] == ["text"] * 4
    (request,) = script.submitted
    assert len(request.prompt) == generation.num_tokens
    assert [(span.start, span.end) for span in request.prompt.spans] == [(s.start, s.end) for s in result.spans]
    (text,) = script.texts()
    assert "Winstanley" in text  # the documents hold the answer
    assert text.count("Eddystone Rocks?") == 1
    assert request.sampling.max_tokens == 24


def test_the_judge_lowers_to_a_span_for_each_candidate(script: Script) -> None:
    script.answer = lambda request: f" number {request.sampling.seed}" if request.sampling.temperature else " that"
    with Session("m", engine="scripted", script=script) as session:
        query = load_query(EXAMPLES / "judge" / "query.py")
        inner, outer = session.explain(query).generations
        result = session.run(query)
    assert (inner.num_samples, inner.is_leased, outer.num_inner) == (8, True, 8)
    assert [span.kind for span in result.spans] == ["generated"] * 8
    *candidates, judge = script.submitted
    assert len({candidate.sampling.seed for candidate in candidates}) == 8
    said = [f"number {candidate.sampling.seed}" for candidate in candidates]
    assert all(script.tokenizer.decode(judge.prompt.token_ids).count(text) == 1 for text in said)


@pytest.mark.parametrize("name", ["rag", "judge"])
def test_a_query_runs_from_a_shell(script: Script, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("spanflow.cli.settings.engine_options", lambda given: {"script": script})
    file = str(EXAMPLES / name / "query.py")
    done = CliRunner().invoke(app, ["run", file, "--engine", "scripted", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["text"] == " fine"


@pytest.mark.parametrize("name", ["rag", "judge"])
def test_a_folder_starts_its_demo(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    commands: list[list[str]] = []
    venv = Path("where-it-is")
    monkeypatch.setitem(sys.modules, "environment", SimpleNamespace(VENV=venv, run=commands.append))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["examples", "--seed", "3"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert commands == [[str(venv / "bin" / "spanflow"), "demo", name, "--seed", "3"]]
