"""The README's commands run as they are written, but for the engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from cli.invoking import invoke
from console import ROOT, shown_commands
from scripted_engine import Script

QUESTION = '(generate :max_tokens 8 (seq (system "Be brief.") (user {} "Which is blue?")))\n'
CORPUS = 'def search(text, k):\n    return ["The sky is blue at noon.", "The sea is blue from afar."][:k]\n'


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with what the commands name."""
    script.window = 10_000
    (tmp_path / "queries").mkdir()
    for path in (tmp_path / "question.span", tmp_path / "queries" / "one.span"):
        path.write_text(QUESTION.format('(commute "The sky." "The sea.")'))
    (tmp_path / "retrieving.span").write_text(QUESTION.format('(retrieve :from "docs" :k 2 "What is blue?")'))
    (tmp_path / "my_corpus.py").write_text(CORPUS)
    monkeypatch.delitem(sys.modules, "my_corpus", raising=False)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("arguments", shown_commands("spanflow"), ids=" ".join)
def test_a_command_of_the_readme_runs(arguments: list[str]) -> None:
    if {"demo", "examples/rag/query.py"}.intersection(arguments):
        pytest.importorskip("bm25s", reason="retrieval needs bm25s")
    engine = [] if arguments[0] in ("fmt", "lint") else ["--engine", "scripted"]
    done = invoke(*arguments, *engine)
    assert done.exit_code == 0, done.output


def test_every_command_of_the_readme_is_looked_at() -> None:
    known = ["spanflow"], ["python3"], [".venv/bin/python", "-m"]
    assert sum(len(shown_commands(*program)) for program in known) == len(shown_commands())
    assert len(shown_commands("spanflow")) >= 8
    for script, *_ in shown_commands("python3"):
        assert (ROOT / script / "__main__.py").is_file()
