"""What a check has to say, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spanflow.optimizer.lint.reading import Reading


@dataclass(frozen=True, slots=True)
class Finding:
    """Something in a query that its author should look at.

    `code` names the check ('SF001'), `path` the node, as in `$.query.operands[2]`; `reason` says what is wrong with
    it and `fix` what to do.
    """

    code: str
    path: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.path}: {self.code} {self.reason}; {self.fix}"


@dataclass(frozen=True, slots=True)
class Limits:
    """What is known of the session: the model's window in tokens, and the answer's length where none is named."""

    max_model_len: int | None
    max_tokens: int


class Check(NamedTuple):
    """A check of one prompt: `what` it finds, in a few words. `find` yields (path, reason, fix)."""

    code: str
    what: str
    find: Callable[[Reading, Limits], Iterator[tuple[str, str, str]]]
