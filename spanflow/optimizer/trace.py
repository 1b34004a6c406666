"""What a pass did, as data: which rule fired where, and the tree that came out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spanflow.ir.fidelity import Rung
from spanflow.ir.nodes import Node
from spanflow.ir.walk import path_through

#: What a pass has to say about the tree that came out of it, line by line, under the session's rung where it is known.
Survey = Callable[[Node, Rung | None], Iterable[str]]


class Place(NamedTuple):
    """Where a node stands: as child `number` of `parent`, as that was then. Its path is spelled when asked for."""

    above: Place | None = None
    parent: Node | None = None
    number: int = 0

    def path(self) -> str:
        """The path from the root, as in `$.query.operands[2]`."""
        return path_through(self._steps())

    def _steps(self) -> Iterator[tuple[Node, int]]:
        place: Place | None = self
        while place is not None and place.parent is not None:
            yield place.parent, place.number
            place = place.above


class Step(NamedTuple):
    """One rewrite: `rule` of pass `pass_name` put the node with digest `after` in the place of that with `before`."""

    pass_name: str
    rule: str
    place: Place
    before: bytes
    after: bytes

    @property
    def path(self) -> str:
        """Where it happened, in the tree as it was then."""
        return self.place.path()


@dataclass(frozen=True, slots=True)
class PassTrace:
    """One pass: its name, why it stands where it does, the tree that came out of it, and the rewrites in order."""

    name: str
    why: str
    root: Node
    steps: tuple[Step, ...] = ()
    survey: Survey | None = None
    rung: Rung | None = None

    @property
    def rules(self) -> dict[str, int]:
        """How often each rule fired, in the order in which they first did."""
        fired: dict[str, int] = {}
        for step in self.steps:
            fired[step.rule] = fired.get(step.rule, 0) + 1
        return fired

    def notes(self) -> tuple[str, ...]:
        """What the pass found out about the tree, besides changing it; worked out when asked for."""
        return () if self.survey is None else tuple(self.survey(self.root, self.rung))


def short_path(path: str, width: int = 120) -> str:
    """A path for a message: one of a very deep tree is shown by its end."""
    return path if len(path) <= width else f"…{path[-width:]}"
