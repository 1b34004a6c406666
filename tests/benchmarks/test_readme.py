"""The README's commands name benchmarks and options that there are."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Any

import pytest
from console import ROOT, shown_commands

SHOWN = shown_commands(".venv/bin/python", "-m")


class Parsed(Exception):
    """The arguments are what the benchmark takes."""


@pytest.mark.torch
@pytest.mark.parametrize("command", SHOWN, ids=" ".join)
def test_a_benchmark_takes_what_the_readme_gives_it(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name, *arguments = command
    main, parse = import_module(name).main, argparse.ArgumentParser.parse_args

    def parse_only(*args: Any) -> None:
        parse(*args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    with pytest.raises(Parsed):
        main(arguments)


def test_each_benchmark_is_shown() -> None:
    names = {f"benchmarks.{path.stem}" for path in (ROOT / "benchmarks").glob("[a-z]*.py")}
    assert {command[0] for command in SHOWN} == names
