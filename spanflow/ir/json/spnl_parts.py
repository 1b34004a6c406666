"""What the forms of spnl are made of: objects with one key, lists, texts and documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

from spanflow.errors import QueryError
from spanflow.ir.json.path import Place, described, within
from spanflow.ir.json.spnl_model import AugmentBody, Role
from spanflow.ir.ranges import check_text
from spanflow.ir.reading import did_you_mean

ROLES: tuple[Role, ...] = ("system", "user", "assistant")
JOINS = ("plus", "cross", "seq", "par")
#: The keys that a query of spnl may have.
KEYS = frozenset([*ROLES, *JOINS, "g", "repeat", "map", "monad", "zip", "augment"])
_ELSEWHERE = {
    "print": "writes to the console of spnl and is no part of the prompt; leave it out",
    "ask": "asks whoever sits at the console of spnl; ask before, and put the answer into a user message",
    "file": "reads a file where spnl runs; read it before, and put the text into a user message",
}


class SpnlDocument(NamedTuple):
    """A document that an `augment` asks about: its name, its text or bytes, and the model to embed it with."""

    name: str
    content: str | bytes
    embedding_model: str


#: Retrievers by the names of documents, or what makes one for a document.
DocumentRetrievers: TypeAlias = "Mapping[str, Any] | Callable[[SpnlDocument], Any]"


def is_spnl_key(key: object) -> bool:
    """Whether a key is one of spnl's, or looks like one."""
    return isinstance(key, str) and (key in KEYS or key in _ELSEWHERE or did_you_mean(key, KEYS) != "")


def only_key(value: Any, place: Place) -> str:
    """The one key of a query of spnl. Raises QueryError that guesses at what was meant."""
    if not isinstance(value, dict):
        raise QueryError(f"{place}: expected a query, an object with one key, got {described(value)}")
    known = ", ".join(sorted(KEYS))
    for key in value:
        if key in _ELSEWHERE:
            raise QueryError(f"{place}: {key!r} cannot be said here: it {_ELSEWHERE[key]}")
        if key not in KEYS:
            guess = did_you_mean(key, KEYS) if isinstance(key, str) else ""
            raise QueryError(f"{place}: unknown key {str(key)[:40]!a}{guess or f'; known keys are {known}'}")
    if len(value) != 1:
        got = ", ".join(map(repr, value)) or "none"
        raise QueryError(f"{place}: expected a query, an object with one key, got {got}; join queries with 'cross'")
    (key,) = value
    return str(key)


def operands_of(value: Any, place: Place) -> list[Any]:
    """A list with something in it. Raises QueryError."""
    if not isinstance(value, list):
        raise QueryError(f"{place}: expected a list of queries, got {described(value)}")
    if not value:
        raise QueryError(f"{place}: there is nothing to join: the list is empty; leave it out")
    return value


def text_of(value: Any, place: Place) -> str:
    """Text that a tokenizer can read. Raises QueryError."""
    if not isinstance(value, str):
        raise QueryError(f"{place}: expected text, got {described(value)}")
    with within(place):
        check_text(value, "")
    return value


def document_of(body: AugmentBody, place: Place) -> SpnlDocument:
    """The document of an `augment`, which stands at `place`. Raises QueryError."""
    name = text_of(body.doc[0], place.at(0))
    content = body.doc[1]
    match content:
        case {"Text": text, **others} if not others:
            return SpnlDocument(name, text_of(text, place.at(1, "Text")), body.embedding_model)
        case {"Binary": list() as numbers, **others} if not others:
            try:
                return SpnlDocument(name, bytes(numbers), body.embedding_model)
            except (TypeError, ValueError):
                raise QueryError(f"{place.at(1, 'Binary')}: expected a list of numbers from 0 to 255") from None
        case _:
            raise QueryError(
                f"{place.at(1)}: expected {{'Text': ...}} or {{'Binary': [...]}}, got {described(content)}"
            )
