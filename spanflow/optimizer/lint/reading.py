"""A prompt as its checks read it: the texts of one generate in order, and the commutes that they stand in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Role, Text
from spanflow.ir.walk import children
from spanflow.optimizer.trace import Place


@dataclass(slots=True, eq=False)
class Group:
    """A commute, together with those that are directly operands of it; `operands` are what commutes there."""

    place: Place
    operands: list[Operand] = field(default_factory=list)

    @property
    def num_operands(self) -> int:
        """How many operands commute there, samples counted."""
        return sum(operand.num_samples for operand in self.operands)


@dataclass(slots=True, eq=False)
class Operand:
    """What commutes in a group, and where it stands; `num_samples` counts the answers of one that is generated."""

    place: Place
    group: Group
    num_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """A text of a prompt. `operand` is the innermost that it is part of, if it stands in a commute."""

    place: Place
    text: str
    role: Role
    is_fragment: bool
    operand: Operand | None

    @property
    def group(self) -> Group | None:
        """The commute that it stands in."""
        return None if self.operand is None else self.operand.group


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An inner generation of a prompt; `operand` as in `Said`."""

    place: Place
    node: Generate | Chat
    operand: Operand | None

    @property
    def group(self) -> Group | None:
        """The commute that it stands in."""
        return None if self.operand is None else self.operand.group

    @property
    def num_samples(self) -> int:
        """How many answers stand in its place."""
        return self.node.n if isinstance(self.node, Generate) else 1

    @property
    def is_operand(self) -> bool:
        """Whether it is an operand itself, and not a part of one."""
        return self.operand is not None and self.operand.place is self.place


@dataclass(slots=True)
class Reading:
    """One prompt. `node` is the generate that reads it, or None for what stands outside of all generates.

    `parts` are its texts and answers in reading order.
    """

    place: Place
    node: Generate | Chat | None
    parts: list[Said | Answer] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def texts(self) -> list[Said]:
        """The texts in reading order."""
        return [part for part in self.parts if isinstance(part, Said)]

    @property
    def answers(self) -> list[Answer]:
        """The inner generations in reading order."""
        return [part for part in self.parts if isinstance(part, Answer)]


def readings(root: Node) -> Iterator[Reading]:
    """The prompts of all generates of a tree, outer ones first; and what stands outside of all of them."""
    todo = [_read(root if isinstance(root, Generate | Chat) else None, root, Place())]
    while todo:
        reading = todo.pop()
        yield reading
        todo += [_read(answer.node, answer.node, answer.place) for answer in reversed(reading.answers)]


class _Visit(NamedTuple):
    """A node and where it stands; `commute` is that of which it is directly an operand."""

    node: Node
    place: Place
    role: Role | None = None
    operand: Operand | None = None
    commute: Group | None = None

    def below(self, role: Role | None, operand: Operand | None, commute: Group | None = None) -> list[_Visit]:
        """The children, the last one first."""
        below = children(self.node)
        return [
            _Visit(below[i], Place(self.place, self.node, i), role, operand, commute)
            for i in range(len(below) - 1, -1, -1)
        ]


def _read(reader: Generate | Chat | None, top: Node, place: Place) -> Reading:
    reading = Reading(place, reader)
    start = _Visit(top, place)
    stack = [start] if reader is None else start.below(None, None)
    while stack:
        visit = stack.pop()
        node, operand = visit.node, visit.operand
        if visit.commute is not None and not isinstance(node, Commute):
            operand = Operand(visit.place, visit.commute, node.n if isinstance(node, Generate) else 1)
            visit.commute.operands.append(operand)
        match node:
            case Text(text=text) | Fragment(text=text):
                is_fragment = isinstance(node, Fragment)
                reading.parts.append(Said(visit.place, text, visit.role or "user", is_fragment, operand))
            case Generate() | Chat():
                reading.parts.append(Answer(visit.place, node, operand))
            case Commute():
                group = visit.commute
                if group is None:
                    group = Group(visit.place)
                    reading.groups.append(group)
                stack += visit.below(visit.role, operand, group)
            case Message(role=role):
                stack += visit.below(role, operand)
            case _:
                stack += visit.below(visit.role, operand)
    return reading
