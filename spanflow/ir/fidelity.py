"""What is computed again when a span is reused: the rung, and the anchor it was computed behind."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from spanflow.errors import QueryError
from spanflow.ir.numbers import MAX_DIGITS, MAX_REPAIR, shown_number

Anchor = Literal["header", "head", "none"]
RungName = Literal["exact", "repair", "moved"]

_MAX_SHOWN = 40
_REPAIR = re.compile(r"repair\(\s*([0-9]+)\s*\)")


@dataclass(frozen=True, slots=True)
class Rung:
    """How faithful a reused span is to full attention (design: fidelity ladder).

    `exact`: full attention, only prefix reuse. `moved`: the span's KV is moved and nothing
    is recomputed. `repair`: moved, then its first `num_tokens` tokens are recomputed in context.
    """

    name: RungName
    num_tokens: int = 0

    def __post_init__(self) -> None:
        if self.name == "repair" and not (type(self.num_tokens) is int and 1 <= self.num_tokens <= MAX_REPAIR):
            raise QueryError(
                f"repair({shown_number(self.num_tokens)}): repair a whole number of tokens, from 1 to "
                f"{MAX_REPAIR}, or say 'moved'"
            )
        if self.name != "repair" and self.num_tokens:
            raise QueryError(f"rung {self.name!r} takes no number of tokens, got {self.num_tokens}")

    def __str__(self) -> str:
        return f"repair({self.num_tokens})" if self.name == "repair" else self.name


EXACT = Rung("exact")
MOVED = Rung("moved")


def repair(num_tokens: int) -> Rung:
    """The rung that recomputes the first `num_tokens` tokens of each span in context."""
    return Rung("repair", num_tokens)


#: What texts get where neither their commute nor the session or run names a rung. Answers are moved then: each stands
#: behind the whole prompt that produced it, and needs repair only where the author says so.
DEFAULT_RUNG = repair(32)


def as_rung(value: Rung | str, where: str = "rung") -> Rung:
    """A `Rung` from itself or from `'exact'`, `'moved'`, `'repair(32)'`. Raises QueryError."""
    match value:
        case Rung():
            return value
        case "exact":
            return EXACT
        case "moved":
            return MOVED
        case str() if (found := _REPAIR.fullmatch(value.strip())) and len(found[1]) <= MAX_DIGITS:
            try:
                return repair(int(found[1]))
            except QueryError as error:
                raise QueryError(f"{where}: {error}") from None
    raise QueryError(
        f"{where}: {_shown(value)} is no rung; say 'exact', 'moved' or 'repair(N)', for example 'repair(32)'"
    )


def _shown(value: object) -> str:
    if isinstance(value, int | float):
        return shown_number(value)
    return f"{value[:_MAX_SHOWN]!r}…" if isinstance(value, str) and len(value) > _MAX_SHOWN else repr(value)


def as_anchor(value: str, where: str = "anchor") -> Anchor:
    """An anchor's name, checked. Raises QueryError."""
    if value not in get_args(Anchor):
        raise QueryError(f"{where}: {value!r} is no anchor; known anchors: {', '.join(get_args(Anchor))}")
    return value  # type: ignore[return-value]
