"""What pydantic refuses, in the words of this package, with the path in the JSON value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from spanflow.errors import QueryError
from spanflow.ir.json.path import Place, described
from spanflow.ir.reading import did_you_mean

M = TypeVar("M", bound=BaseModel)

_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
}
_TEXT = ", got the text"
_WORD = re.compile(r"\w+")


def validated(model: type[M], value: Any, place: Place) -> M:
    """The value as that model. Raises QueryError with the path of the first problem."""
    if not isinstance(value, dict):
        raise QueryError(f"{place}: expected an object, got {described(value)}")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _refused(error, model, place) from None


def _refused(error: ValidationError, model: type[BaseModel], place: Place) -> QueryError:
    problems = error.errors(include_url=False)
    # A misspelled key is both unknown and missing; the first says more.
    problem = next((one for one in problems if one["type"] == "extra_forbidden"), problems[0])
    location = problem["loc"]
    if location[-1:] == ("[key]",):
        return QueryError(f"{place.at(*location[:-2])}: keys must be text, got {described(problem['input'])}")
    here = place.at(*location)
    known = [field.alias or name for name, field in model.model_fields.items()]
    match problem["type"]:
        case "extra_forbidden":
            key = str(location[-1])
            guess = did_you_mean(key, known)
            around = place.at(*location[:-1])
            return QueryError(f"{around}: unknown key {key[:40]!a}{guess}{'' if guess else _known(known)}")
        case "invalid_key":
            return QueryError(f"{place.at(*location[:-1])}: keys must be text, got {described(location[-1])}")
        case "missing":
            return QueryError(f"{place.at(*location[:-1])}: {location[-1]!r} is missing")
        case _:
            return QueryError(f"{here}: {_said(problem)}")


def _said(problem: Mapping[str, Any]) -> str:
    """What was expected, and what was there."""
    got = f", got {described(problem['input'])}"
    bounds = problem.get("ctx", {})
    match problem["type"]:
        case "string_unicode":
            return "the text holds half of a surrogate pair, which no tokenizer can read"
        case "string_pattern_mismatch":
            return f"expected 'exact', 'moved' or 'repair(N)', for example 'repair(32)'{got}"
        case "string_too_short":
            return "expected text that is not empty"
        case "too_short":
            return f"expected at least {bounds['min_length']}{got}"
        case "too_long":
            return f"expected at most {bounds['max_length']}{got}"
        case "greater_than_equal":
            return f"expected at least {_shown(bounds['ge'])}{got}"
        case "greater_than":
            return f"expected more than {_shown(bounds['gt'])}{got}"
        case "less_than_equal":
            return f"expected at most {_shown(bounds['le'])}{got}"
        case "literal_error":
            guess = did_you_mean(problem["input"], _WORD.findall(bounds["expected"])) if got.startswith(_TEXT) else ""
            return f"expected {bounds['expected']}{got}{guess}"
        case kind if expected := _TYPES.get(kind):
            return f"expected {expected}{got}"
        case _:
            return f"{problem['msg']}{got}"


def _shown(bound: float) -> str:
    return str(int(bound) if bound == int(bound) else bound)


def _known(keys: list[str]) -> str:
    return f"; known keys are {', '.join(keys)}"
