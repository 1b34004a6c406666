"""Values of the caller's that are kept: nobody else changes them any more."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def copied(value: Any) -> Any:
    """The same value with lists, tuples and mappings of its own, at any depth."""
    match value:
        case list():
            return [copied(item) for item in value]
        case tuple() if type(value) is tuple:
            return tuple(copied(item) for item in value)
        case Mapping():
            return {key: copied(item) for key, item in value.items()}
        case _:
            return value
