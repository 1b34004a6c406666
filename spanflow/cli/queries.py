"""Queries from files: Python, the text form, the JSON form; and the retrievers that written ones name."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from spanflow.errors import QueryError

STDIN = Path("-")


class AnyRetriever(Mapping[str, Any]):
    """A retriever of any name, for commands that ask none."""

    def __getitem__(self, name: str) -> Any:
        return _finds_nothing

    def __iter__(self) -> Iterator[str]:
        return iter(["..."])

    def __len__(self) -> int:
        return 1


def load_query(file: Path, retrievers: Mapping[str, Any] | None = None) -> Any:
    """What a file asks: the `query` of FILE.py, the text form of FILE.span, the JSON form of FILE.json; either of the
    latter from stdin.

    A Python file's `query` may be the JSON form too, as a dict; its `retrievers`, if it has some, are known by their
    names, as are those given. Raises QueryError that names the file, and OSError.
    """
    if is_python(file):
        return _of_module(file, retrievers)
    return query_of(read_source(file), file, retrievers)


def query_of(source: str, file: Path, retrievers: Mapping[str, Any] | None = None) -> Any:
    """The query that the text of a file, or of stdin, says. Raises QueryError that names the file."""
    if not is_text_form(source, file):
        return _from_json(source, source_name(file), retrievers)
    from spanflow.ir.text import from_text

    return from_text(source, filename=source_name(file), retrievers=retrievers)


def is_python(file: Path) -> bool:
    """Whether a file defines its query, or else says it. Raises QueryError for a name that means neither."""
    if file == STDIN or file.suffix in (".span", ".json"):
        return False
    if file.suffix == ".py":
        return True
    raise QueryError(
        f"{file}: expected a name that ends in .py (Python that defines `query`), .span (the text form) or .json (the "
        "JSON form); - reads either of the latter from stdin"
    )


def is_text_form(source: str, file: Path) -> bool:
    """Whether it is the text form, or else the JSON form, which on stdin is known by its brace."""
    return not source.lstrip().startswith("{") if file == STDIN else file.suffix == ".span"


def load_retrievers(given: list[str] | None, file: Path) -> dict[str, Any]:
    """`NAME=module:attr` texts as retrievers; modules may also lie beside the file or in the current directory.

    Raises QueryError.
    """
    retrievers: dict[str, Any] = {}
    for text in given or ():
        name, found, target = text.partition("=")
        module, colon, attribute = target.partition(":")
        if not (found and colon and name and module and attribute):
            raise QueryError(f"--retriever {text!r}: write NAME=module:attr, as in --retriever docs=my_corpus:search")
        with _importable(file.parent, Path()):
            try:
                value: Any = importlib.import_module(module)
                for step in attribute.split("."):
                    value = getattr(value, step)
            except Exception as error:
                raise QueryError(f"--retriever {text!r}: {type(error).__name__}: {error}") from error
        retrievers[name] = value
    return retrievers


def source_name(file: Path) -> str:
    """What errors call a file."""
    return "<stdin>" if file == STDIN else str(file)


def read_source(file: Path) -> str:
    """The text of a file or of stdin, with its own line ends. Raises QueryError, and OSError."""
    data = sys.stdin.buffer.read() if file == STDIN else file.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise QueryError(f"{source_name(file)}: byte {error.start} is no UTF-8; write the file in UTF-8") from None


def _from_json(data: Mapping[str, Any] | str, name: str, retrievers: Mapping[str, Any] | None) -> Any:
    from spanflow.ir.json import from_json

    try:
        return from_json(data, retrievers=retrievers)
    except QueryError as error:
        raise QueryError(f"{name}: {error}") from None


def _of_module(file: Path, retrievers: Mapping[str, Any] | None) -> Any:
    module = _load_module(file)
    try:
        query = module.query
    except AttributeError:
        raise QueryError(f"{file}: it defines no `query`; add one, as in: query = generate(user('Hello'))") from None
    if not isinstance(query, Mapping):
        return query
    named = getattr(module, "retrievers", None) or {}
    if not isinstance(named, Mapping):
        raise QueryError(f"{file}: `retrievers` must be a dict of retrievers by name, got {type(named).__name__}")
    known = retrievers if isinstance(retrievers, AnyRetriever) else {**named, **(retrievers or {})}
    return _from_json(query, f"{file}: query", known)


def _load_module(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with _importable(file.parent):
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
            place = f"{file}:{lines[-1]}" if lines else str(file)
            raise QueryError(f"{place}: {type(error).__name__}: {error}") from error
    return module


@contextmanager
def _importable(*folders: Path) -> Iterator[None]:
    """Modules in these folders can be imported."""
    names = [str(folder.resolve()) for folder in folders]
    sys.path[:0] = names
    try:
        yield
    finally:
        for name in names:
            sys.path.remove(name)


def _finds_nothing(query: str) -> list[str]:
    return []
