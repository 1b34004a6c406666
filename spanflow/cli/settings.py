"""What several commands ask for in the same way, and the session that it makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spanflow.cli.output import say
from spanflow.cli.queries import STDIN
from spanflow.errors import QueryError

if TYPE_CHECKING:
    from spanflow.session import Session

#: Options that may name what only a hub has.
_MAY_BE_ON_A_HUB = {"adapters", "tokenizer"}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else, on stdout.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Model = Annotated[str, typer.Option(help="A model's name, directory or hub name.")]
EngineName = Annotated[str, typer.Option("--engine", help="vllm, oracle or simulator.")]
RungName = Annotated[
    str | None,
    typer.Option(
        "--rung", help="exact, repair(N) or moved; if none is named, repair(32) for texts, moved for answers."
    ),
]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", help="An option of the engine, as in -o kv_cache_gib=2.", metavar="NAME=VALUE"),
]
Retrievers = Annotated[
    list[str] | None,
    typer.Option("--retriever", help="A retriever that a written query names.", metavar="NAME=module:attr"),
]


def _must_be_file(file: Path) -> Path:
    """Refuse names of files that are none; typer's own check knows no - for stdin."""
    if file != STDIN and not file.is_file():
        raise typer.BadParameter(f"file '{file}' {'is a directory' if file.is_dir() else 'does not exist'}")
    return file


def _with_contents(given: list[Path] | None) -> list[Path]:
    """The files, and in place of a directory those that hold the text form below it. Refuses names of nothing."""
    files: list[Path] = []
    for path in given or ():
        if path.is_dir():
            found = sorted(file for file in path.rglob("*.span") if file.is_file())
            if not found:
                raise typer.BadParameter(f"there is no .span file below '{path}'")
            files += found
        else:
            files.append(_must_be_file(path))
    return files


File = Annotated[
    Path,
    typer.Argument(
        help="A query: .py (Python that defines `query`), .span (text form), .json (JSON form), or - (text or JSON on "
        "stdin).",
        callback=_must_be_file,
    ),
]
_FILES = typer.Argument(
    help="Queries, as files; - is stdin, and a directory stands for the .span files below it.",
    callback=_with_contents,
)
Files = Annotated[list[Path], _FILES]
SomeFiles = Annotated[list[Path] | None, _FILES]


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
    model: str,
    engine: str,
    rung: str | None = None,
    option: list[str] | None = None,
    *,
    only_our_code: bool = False,
    **defaults: Any,
) -> Session:
    """A session that tells its progress on stderr; options of the command line win over `defaults`.

    Where `only_our_code` runs in this process, and none of the user's, nobody asks a hub for a model that is here.
    """
    from spanflow.engine.environment import stay_offline
    from spanflow.engine.models import known_models
    from spanflow.session import Session

    options = defaults | engine_options(option)
    if only_our_code and model in known_models() and not _MAY_BE_ON_A_HUB & options.keys():
        stay_offline()
    return Session(model, engine=engine, rung=rung, progress=say, **options)
