"""The values that fields of a node may take, in one place: for the combinators and for verification."""

from __future__ import annotations

import math
from typing import Any

from spanflow.errors import QueryError
from spanflow.ir.nodes import Sampling
from spanflow.ir.numbers import MAX_INT, shown_number

#: Samples of one generate.
MAX_N = 255
#: Stop strings of one generate.
MAX_STOPS = 16


def check_text(text: object, where: str) -> None:
    """Refuse what is not text that has a UTF-8 form. Raises QueryError with the position."""
    if not isinstance(text, str):
        raise QueryError(f"{where}: must be text, got {_shown(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QueryError(
            f"{where}: the character at position {error.start} is half of a surrogate pair "
            f"(\\u{ord(text[error.start]):04x}), which no tokenizer can read; decode the source with "
            "errors='replace', or join the two halves"
        ) from None


def check_count(value: object, where: str, least: int, most: int = MAX_INT) -> None:
    """Refuse what is not a whole number in [least, most]. Raises QueryError."""
    if (type(value) is int or _is_whole(value)) and least <= value <= most:  # type: ignore[operator]
        return
    wanted = f"at least {least}" if most == MAX_INT else f"from {least} to {most}"
    raise QueryError(f"{where}: must be a whole number {wanted}, got {_shown(value)}")


def check_sampling(sampling: object, where: str) -> None:
    """Refuse sampling options out of range. Raises QueryError that names the option."""
    if not isinstance(sampling, Sampling):
        raise QueryError(f"{where}: must be a Sampling, got {_shown(sampling)}")
    if sampling.max_tokens is not None:
        check_count(sampling.max_tokens, f"{where}: max_tokens", 1)
    if not _is_number(sampling.temperature) or not 0 <= sampling.temperature < math.inf:
        raise QueryError(
            f"{where}: temperature: must be a number of at least 0 (0 is greedy), got {_shown(sampling.temperature)}"
        )
    if not _is_number(sampling.top_p) or not 0 < sampling.top_p <= 1:
        raise QueryError(f"{where}: top_p: must be a number above 0 and at most 1, got {_shown(sampling.top_p)}")
    if sampling.seed is not None:
        check_count(sampling.seed, f"{where}: seed", 0)
    _check_stop(sampling.stop, f"{where}: stop")
    if sampling.schema is not None:
        check_text(sampling.schema, f"{where}: schema")


def _check_stop(stop: object, where: str) -> None:
    if not isinstance(stop, tuple):
        raise QueryError(f"{where}: must be a tuple of texts, got {_shown(stop)}")
    if len(stop) > MAX_STOPS:
        raise QueryError(f"{where}: at most {MAX_STOPS} stop strings, got {len(stop)}")
    for index, text in enumerate(stop):
        check_text(text, f"{where}[{index}]")
        if not text:
            raise QueryError(f"{where}[{index}]: an empty stop string would stop every answer at once; leave it out")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return type(value) is float or isinstance(value, float) or _is_whole(value)


def _shown(value: Any) -> str:
    if isinstance(value, int | float):
        return shown_number(value)
    return repr(value) if value is None else type(value).__name__
