"""Just enough of JSON Schema to hold what is written against the published schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {"$ref", "anyOf", "type", "const", "enum", "pattern", "minimum", "maximum", "exclusiveMinimum", "minLength"}
_KNOWN |= {"maxLength", "minItems", "maxItems", "items", "properties", "required", "additionalProperties"}
_WORDS = {"$schema", "$defs", "title", "description", "default"}


def problems(value: Any, schema: dict[str, Any], root: dict[str, Any], path: str = "$") -> Iterator[str]:
    """What about a value breaks the schema; each with its path."""
    unknown = set(schema) - _KNOWN - _WORDS
    assert not unknown, f"this check does not know {unknown}"
    if "$ref" in schema:
        name = schema["$ref"].removeprefix("#/$defs/")
        yield from problems(value, root["$defs"][name], root, path)
        return
    if "anyOf" in schema:
        found = [list(problems(value, one, root, path)) for one in schema["anyOf"]]
        if all(found):
            yield f"{path}: none of {len(found)} fits: {found}"
        return
    kinds = schema.get("type", list(_TYPES))
    if not any(_is(value, kind) for kind in ([kinds] if isinstance(kinds, str) else kinds)):
        yield f"{path}: {value!r} is no {kinds}"
        return
    yield from (f"{path}: {problem}" for problem in _bounds(value, schema))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), root, f"{path}[{index}]")
    if isinstance(value, dict):
        properties = schema.get("properties", {})
        yield from (f"{path}: {key} is missing" for key in schema.get("required", []) if key not in value)
        for key, item in value.items():
            if key not in properties and schema.get("additionalProperties", True) is False:
                yield f"{path}: {key} is unknown"
            yield from problems(item, properties.get(key, {}), root, f"{path}.{key}")


def _is(value: Any, kind: str) -> bool:
    return isinstance(value, _TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool))


def _bounds(value: Any, schema: dict[str, Any]) -> Iterator[str]:
    checks = {
        "const": lambda bound: value == bound,
        "enum": lambda bound: value in bound,
        "pattern": lambda bound: re.search(bound, value) is not None,
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "minLength": lambda bound: len(value) >= bound,
        "maxLength": lambda bound: len(value) <= bound,
        "minItems": lambda bound: len(value) >= bound,
        "maxItems": lambda bound: len(value) <= bound,
    }
    yield from (f"{key} {bound}" for key, bound in schema.items() if key in checks and not checks[key](bound))
