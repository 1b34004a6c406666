"""What the readers of the written forms share: retrievers by name, guesses at words, places of errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from spanflow.errors import QueryError

_STEP = re.compile(r"\.[a-z]+(?:\[(\d+)\])?")
_LONGEST_GUESS = 40
_CLOSE = 0.7


def find_retriever(name: str, retrievers: Mapping[str, Any] | None) -> Any:
    """The retriever of that name. Raises QueryError that lists the names there are."""
    if not retrievers:
        raise QueryError(
            f"there is no retriever {name!r}: none were given; pass retrievers={{{name!r}: ...}}, or on the command "
            f"line --retriever {name}=module:attr"
        )
    if retrievers.get(name) is None:
        known = ", ".join(map(repr, retrievers))
        raise QueryError(f"there is no retriever {name!r} (known: {known}){did_you_mean(name, retrievers)}")
    return retrievers[name]


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'user'?` where a known word is close, and nothing where none is."""
    close = get_close_matches(word.casefold(), list(known), 1, _CLOSE) if len(word) <= _LONGEST_GUESS else []
    return f"; did you mean {close[0]!r}?" if close else ""


def split_path(text: str) -> tuple[list[int], str]:
    """Which children lead from the root to the node that a text names at its beginning, and what follows that."""
    end = 1
    steps: list[int] = []
    while found := _STEP.match(text, end):
        steps.append(int(found[1] or 0))
        end = found.end()
    return steps, text[end:].removeprefix(": ")
