"""Each command takes `--json`: one document on stdout and nothing else there, when it succeeds and when it fails."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer
from cli.invoking import invoke
from scripted_engine import Script
from typer.testing import Result

from spanflow import EngineDied
from spanflow.cli.app import app
from spanflow.cli.settings import engine_options

pytest.importorskip("bm25s", reason="the retrieval demo needs bm25s")

TIDY = '(generate (seq (commute (user "one text") (user "another text")) (user "Which?")))\n'
ENGINE = ["--engine", "scripted"]

#: How each command is asked, and a key of the document that it prints then. A command that is new belongs here.
ASKED: dict[str, tuple[list[str], str]] = {
    "run": (["FILE", *ENGINE], "text"),
    "explain": (["FILE", *ENGINE], "generations"),
    "fmt": (["FILE"], "files"),
    "lint": (["FILE"], "findings"),
    "doctor": (ENGINE, "is_well"),
    "demo rag": (["--questions", "2", *ENGINE], "rows"),
    "demo judge": (["--candidates", "2", *ENGINE], "stock"),
}
#: How each is asked what it refuses, and what the error says.
REFUSED = {
    "run": (["FILE", "--rung", "half", *ENGINE], "'half' is no rung"),
    "explain": (["FILE", "--rung", "half", *ENGINE], "'half' is no rung"),
    "fmt": (["WRONG"], "WRONG.span:1:"),
    "lint": (["WRONG"], "WRONG.span:1:"),
    "doctor": (["--option", "half"], "write NAME=VALUE"),
    "demo rag": (["--questions", "5000", *ENGINE], "num_questions: must be a whole number from 1 to"),
    "demo judge": (["--candidates", "25", *ENGINE], "num_candidates: must be a whole number from 2 to 24, got 25"),
}


def commands() -> dict[str, click.Command]:
    """Every command by its words, as the parser knows them."""

    def below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not hasattr(command, "commands"):
            yield " ".join(words), command
        for name, inner in getattr(command, "commands", {}).items():
            yield from below(inner, (*words, name))

    return dict(below(typer.main.get_command(app), ()))


Ask = Callable[[str, list[str]], Result]


@pytest.fixture
def ask(tmp_path: Path, script: Script, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Ask a command with `--json`; the names of files stand for files in the text form."""
    files = {"FILE": TIDY, "WRONG": "(generate"}
    for name, text in files.items():
        (tmp_path / f"{name}.span").write_text(text)
    script.window = 10_000
    monkeypatch.setattr("spanflow.doctor.recompute", lambda session: "no oracle in a test without a model")

    def ask(command: str, arguments: list[str]) -> Result:
        options: dict[str, Any] = {"script": script}
        if command == "explain":  # which starts no engine that could be asked
            options |= {"tokenizer": script.tokenizer, "max_model_len": script.window}
        monkeypatch.setattr("spanflow.cli.settings.engine_options", lambda given: engine_options(given) | options)
        paths = [tmp_path / f"{argument}.span" if argument in files else argument for argument in arguments]
        return invoke(*command.split(), *paths, "--json")

    return ask


def test_the_parser_is_walked_to_its_leaves() -> None:
    assert {"run", "fmt", "demo rag"} <= commands().keys()
    assert ASKED.keys() == REFUSED.keys() == commands().keys()


@pytest.mark.parametrize("command", commands())
def test_every_command_has_json(command: str) -> None:
    (option,) = [parameter for parameter in commands()[command].params if "--json" in parameter.opts]
    assert option.help == "Print one JSON document, and nothing else, on stdout."


@pytest.mark.parametrize("command", ASKED)
def test_every_command_prints_one_document(ask: Ask, command: str) -> None:
    arguments, key = ASKED[command]
    done = ask(command, arguments)
    assert (done.exit_code, done.exception) == (0, None)
    document = json.loads(done.stdout)
    assert key in document
    assert "error" not in document


@pytest.mark.parametrize("command", REFUSED)
def test_every_command_prints_one_document_about_an_error(ask: Ask, command: str) -> None:
    arguments, message = REFUSED[command]
    done = ask(command, arguments)
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert message in done.stderr
    if command in ("fmt", "lint"):  # which go on with the other files
        (said,) = [str(each["error"]) for each in document.get("files", ())] or [
            each["message"] for each in document["errors"]
        ]
    else:
        assert document.keys() == {"error", "message"}
        assert document["error"] == "QueryError"
        said = document["message"]
    assert message in said


@pytest.mark.parametrize("command", ASKED)
def test_wrong_usage_leaves_stdout_empty(ask: Ask, command: str) -> None:
    done = ask(command, [*ASKED[command][0], "--half"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "No such option: --half" in done.stderr


@pytest.mark.parametrize("command", ["run", "demo rag", "demo judge"])
def test_an_engine_that_dies_at_work_is_a_document_too(ask: Ask, script: Script, command: str) -> None:
    script.answer = lambda request: EngineDied("the engine stopped")
    done = ask(command, ASKED[command][0])
    assert done.exit_code == 1
    assert json.loads(done.stdout) == {"error": "EngineDied", "message": "the engine stopped"}
    assert "error: the engine stopped" in done.stderr
