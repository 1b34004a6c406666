"""What several commands ask for in the same way, and the session that it makes."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spanflow.cli.output import say
from spanflow.errors import QueryError

if TYPE_CHECKING:
    from spanflow.session import Session

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[str, typer.Option(help="A model's name, directory or hub name.")]
EngineName = Annotated[str, typer.Option("--engine", help="vllm, oracle or simulator.")]
RungName = Annotated[str | None, typer.Option("--rung", help="exact, repair(N) or moved; repair(32) if none is named.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option of the engine, as in -o kv_cache_gib=2.", metavar="NAME=VALUE"),
]
File = Annotated[Path, typer.Argument(help="A Python file that defines `query`.", exists=True, dir_okay=False)]


def engine_options(given: list[str] | None) -> dict[str, Any]:
    """`NAME=VALUE` texts as options; values are JSON where they can be, else text. Raises QueryError."""
    options: dict[str, Any] = {}
    for text in given or ():
        name, found, value = text.partition("=")
        if not (found and name.isidentifier()):
            raise QueryError(f"--option {text!r}: write NAME=VALUE, as in -o kv_cache_gib=2")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    return options


def open_session(
    model: str, engine: str, rung: str | None = None, option: list[str] | None = None, **defaults: Any
) -> Session:
    """A session that tells its progress on stderr; options of the command line win over `defaults`."""
    from spanflow.session import Session

    return Session(model, engine=engine, rung=rung, progress=say, **(defaults | engine_options(option)))


def load_query(file: Path) -> Any:
    """The `query` of a Python file. Raises QueryError where there is none, or the file fails."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise QueryError(f"{file}: this is no Python file; name one that ends in .py")
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.parent.resolve()))
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        place = f"{file}:{lines[-1]}" if lines else str(file)
        raise QueryError(f"{place}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(file.parent.resolve()))
    try:
        return module.query
    except AttributeError:
        raise QueryError(f"{file}: it defines no `query`; add one, as in: query = generate(user('Hello'))") from None
