"""Values that JSON can say: the metadata of fragments, and the schemas of answers."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from spanflow.errors import QueryError
from spanflow.ir.numbers import MAX_DIGITS, TOO_LONG, shown_number
from spanflow.ir.ranges import check_text

#: Levels of lists and objects in metadata and schemas.
MAX_NESTING = 100

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def child_step(key: str | int) -> str:
    """One step of a path: `[2]`, `.name`, or `["odd name"]`."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if _NAME.fullmatch(key) else f"[{json.dumps(key[:40])}]"


def check_data(value: object, where: str) -> None:
    """Refuse what JSON cannot say: other types, infinities, keys that are no text, too many levels.

    Lists may be tuples. Raises QueryError that names the place.
    """
    stack: list[tuple[object, str, int]] = [(value, where, 1)]
    while stack:
        item, here, level = stack.pop()
        if level > MAX_NESTING + 1:
            raise QueryError(f"{where}: nested more than {MAX_NESTING} levels deep; does a list contain itself?")
        match item:
            case None | bool():
                pass
            case int():
                if abs(item) >= TOO_LONG:
                    raise QueryError(
                        f"{here}: {shown_number(item)}, and at most {MAX_DIGITS:,} can be read again; write text for it"
                    )
            case str():
                check_text(item, here)
            case float():
                if not math.isfinite(item):
                    raise QueryError(f"{here}: {item} has no JSON form; write null or text for it")
            case list() | tuple():
                stack.extend((item[i], here + child_step(i), level + 1) for i in range(len(item) - 1, -1, -1))
            case dict():
                for key in reversed(item):
                    if not isinstance(key, str):
                        raise QueryError(f"{here}: keys must be text, got {key!r}")
                    check_text(key, f"{here}: a key")
                    stack.append((item[key], here + child_step(key), level + 1))
            case _:
                raise QueryError(
                    f"{here}: a value of type {type(item).__name__} has no JSON form; use text, numbers, True, "
                    "False, None, lists and dicts"
                )


def checked_metadata(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A fragment's metadata as a dict in the order of its keys. Raises QueryError for what JSON cannot say."""
    check_data(dict(metadata), where)
    return {key: metadata[key] for key in sorted(metadata)}


def schema_data(schema: str) -> dict[str, Any] | bool | None:
    """What a schema's text says, where the same text comes back from it; None for any other text."""
    if not schema.startswith(("{", "true", "false")):
        return None
    try:
        data = json.loads(schema)
        check_data(data, "schema")
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict | bool) and schema_text(data) == schema else None


def schema_text(schema: Mapping[str, Any] | bool) -> str:
    """A JSON Schema as the compact text that `Sampling.schema` holds; its keys keep their order."""
    return json.dumps(schema, separators=(",", ":"), allow_nan=False)
