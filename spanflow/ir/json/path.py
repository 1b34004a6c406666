"""Places in a JSON value, as in `$.g.input.plus[2]`; spelled out only when something is wrong there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from spanflow.errors import QueryError
from spanflow.ir.data import child_step

_LONGEST = 240


class Place(NamedTuple):
    """A value by the place of the value around it and its own key or index; the outermost has neither."""

    around: Place | None = None
    key: str | int = ""

    def at(self, *keys: str | int) -> Place:
        """A place inside of this one."""
        place = self
        for key in keys:
            place = Place(place, key)
        return place

    def __str__(self) -> str:
        steps: list[str] = []
        place: Place | None = self
        while place is not None and place.around is not None:
            steps.append(child_step(place.key))
            place = place.around
        path = "$" + "".join(reversed(steps))
        return path if len(path) <= _LONGEST else f"{path[: _LONGEST // 2]}…{path[-_LONGEST // 2 :]}"


ROOT = Place()


@contextmanager
def within(place: Place) -> Iterator[None]:
    """Errors of checks that name no place, or one inside of this one, name it from the outermost value on."""
    try:
        yield
    except QueryError as error:
        raise QueryError(f"{place}{error}") from None


def described(value: Any) -> str:
    """A value in an error message, in JSON's words."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case int() | float() if abs(value) < 1e15:
            return f"the number {value}"
        case int() | float():
            return "a very large number"
        case str():
            return f"the text {value[:40]!a}{'…' if len(value) > 40 else ''}"
        case list():
            return f"a list of {len(value)}"
        case tuple():
            return f"a tuple of {len(value)}, which JSON has not"
        case dict():
            return "an object"
        case _:
            return f"a value of type {type(value).__name__}"
