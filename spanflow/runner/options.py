"""How a run goes: the defaults of a session, which each run may change."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from spanflow.errors import QueryError
from spanflow.ir.fidelity import Anchor, Rung, as_anchor, as_rung
from spanflow.ir.ranges import check_count, check_text

#: What becomes of a query when one of its generations fails: the whole of it fails; the candidate is dropped from its
#: commute; or the generation is tried again.
ErrorPolicy: TypeAlias = Literal["fail", "skip", "retry"]

DEFAULT_ANCHOR: Anchor = "header"

_MAX_LEASE_SECONDS = 24 * 3600


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of a run.

    `rung` and `anchor` hold for each commute that names none; a `rung` of None is repair(32) for texts, and moved for
    generated answers. `max_tokens` and `seed` hold for each generate that names none. `max_tokens` is cut to the room
    that the prompt leaves in the model's window. `num_retries` counts further attempts under 'retry'. `timeout` is in
    seconds, for one attempt at one generation, waiting for its turn not counted. `lease_seconds` bounds how long an
    answer's KV is kept for its readers. `salt` separates tenants: KV is shared only among runs of one salt. Of waiting
    requests, those with the lowest `priority` go first, where the engine schedules by priority.
    """

    rung: Rung | None = None
    anchor: Anchor = DEFAULT_ANCHOR
    max_tokens: int = 256
    seed: int = 0
    on_error: ErrorPolicy = "fail"
    num_retries: int = 2
    timeout: float | None = None
    lease_seconds: float = 600.0
    salt: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.rung, Rung | None):
            raise QueryError(f"rung: expected a Rung, got {self.rung!r}; as_rung('repair(32)') makes one")
        as_anchor(self.anchor)
        check_count(self.max_tokens, "max_tokens", 1)
        check_count(self.seed, "seed", 0)
        if self.on_error not in get_args(ErrorPolicy):
            known = ", ".join(map(repr, get_args(ErrorPolicy)))
            raise QueryError(f"on_error: {self.on_error!r} is no policy; known policies: {known}")
        check_count(self.num_retries, "num_retries", 0)
        _check_seconds(self.timeout, "timeout", math.inf)
        _check_seconds(self.lease_seconds, "lease_seconds", _MAX_LEASE_SECONDS)
        if self.salt is not None:
            check_text(self.salt, "salt")
        if not isinstance(self.priority, int):
            raise QueryError(f"priority: expected a whole number, got {self.priority!r}")

    def changed(self, changes: Mapping[str, Any]) -> RunOptions:
        """The same with other values; None for rung, anchor, max_tokens, seed and on_error changes nothing.

        A rung may be given by name. Raises QueryError for an option that does not exist.
        """
        known = [option.name for option in fields(self)]
        if unknown := [name for name in changes if name not in known]:
            names = ", ".join(map(repr, unknown))
            raise QueryError(f"a run has no option {names}; its options: {', '.join(known)}")
        may_be_none = ("timeout", "salt")
        new = {name: value for name, value in changes.items() if value is not None or name in may_be_none}
        if "rung" in new:
            new["rung"] = as_rung(new["rung"])
        return replace(self, **new)


def _check_seconds(value: object, where: str, most: float) -> None:
    if value is None and where == "timeout":
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        limit = "" if most == math.inf else f" and at most {most:,}"
        raise QueryError(f"{where}: expected a number of seconds above 0{limit}, got {value!r}")
