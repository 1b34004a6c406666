"""What a check has to say, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from spanflow.optimizer.lint.reading import Reading
from spanflow.optimizer.trace import Place


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a query that its author should look at.

    `code` names the check ('SF001'), `path` the node, as in `$.query.operands[2]`; `reason` says what is wrong with
    it and `fix` what to do. `line` and `column` say where a query is written, where that is known.
    """

    code: str
    path: str
    reason: str
    fix: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.line}:{self.column}"
        return f"{place}: {self.code} {self.reason}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What is known of the session: the model's window in tokens, and the answer's length where none is named."""

    max_model_len: int | None
    max_tokens: int


#: What a check finds: where, why, and what to do.
Found: TypeAlias = tuple[Place, str, str]


class Check(NamedTuple):
    """A check of one prompt: `what` it finds, in a few words."""

    code: str
    what: str
    find: Callable[[Reading, Limits], Iterator[Found]]
