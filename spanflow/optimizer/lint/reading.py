"""A prompt as its checks read it: the texts of one generate in order, and the commutes that they stand in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Role, Text
from spanflow.ir.walk import ROOT, child_path, children


@dataclass(frozen=True, slots=True)
class Said:
    """A text of a prompt. `operand` is the path of the operand that it is part of, `group` that of its commute."""

    path: str
    text: str
    role: Role
    is_fragment: bool
    operand: str | None
    group: str | None


@dataclass(frozen=True, slots=True)
class Answer:
    """An inner generation of a prompt; `group` and `operand` as in `Said`."""

    path: str
    node: Generate | Chat
    operand: str | None
    group: str | None

    @property
    def num_samples(self) -> int:
        """How many answers stand in its place."""
        return self.node.n if isinstance(self.node, Generate) else 1


@dataclass(frozen=True, slots=True)
class Group:
    """A commute, with those that are directly operands of it; `operands` are the paths of what commutes."""

    path: str
    operands: tuple[str, ...]


@dataclass(slots=True)
class Reading:
    """One prompt. `node` is the generate that reads it, or None for what stands outside of all generates.

    `parts` are its texts and answers in reading order, `num_messages` how many messages they make.
    """

    path: str
    node: Generate | Chat | None
    parts: list[Said | Answer] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    num_messages: int = 0

    @property
    def texts(self) -> list[Said]:
        """The texts in reading order."""
        return [part for part in self.parts if isinstance(part, Said)]

    @property
    def answers(self) -> list[Answer]:
        """The inner generations in reading order."""
        return [part for part in self.parts if isinstance(part, Answer)]

    def num_operands(self, group: Group) -> int:
        """How many operands commute there, samples counted."""
        samples = {part.operand: part.num_samples for part in self.answers if part.path == part.operand}
        return sum(samples.get(operand, 1) for operand in group.operands)


def readings(root: Node) -> Iterator[Reading]:
    """The prompts of all generates of a tree, outer ones first; and what stands outside of all of them."""
    todo = [_read(root if isinstance(root, Generate | Chat) else None, root, ROOT)]
    while todo:
        reading = todo.pop()
        yield reading
        todo += [_read(answer.node, answer.node, answer.path) for answer in reversed(reading.answers)]


class _Visit(NamedTuple):
    node: Node
    path: str
    role: Role | None = None
    operand: str | None = None
    group: str | None = None
    is_operand: bool = False


def _read(reader: Generate | Chat | None, top: Node, path: str) -> Reading:
    reading = Reading(path, reader)
    stack = [_Visit(top, path)]
    if reader is not None:
        stack = [_Visit(child, child_path(top, path, i)) for i, child in enumerate(children(top))][::-1]
    members: dict[str, list[str]] = {}
    while stack:
        visit = stack.pop()
        node = visit.node
        below = [child_path(node, visit.path, i) for i in range(len(children(node)))]
        match node:
            case Text(text=text) | Fragment(text=text):
                reading.num_messages += visit.role is None
                is_fragment = isinstance(node, Fragment)
                reading.parts.append(
                    Said(visit.path, text, visit.role or "user", is_fragment, visit.operand, visit.group)
                )
            case Generate() | Chat():
                if visit.role is None:  # inside a message it is a part of that
                    reading.num_messages += node.n if isinstance(node, Generate) else 1
                reading.parts.append(Answer(visit.path, node, visit.operand, visit.group))
            case Commute():
                group = visit.group if visit.is_operand and visit.group is not None else visit.path
                inner = members.setdefault(group, [])
                inner += [
                    name for name, child in zip(below, node.operands, strict=True) if not isinstance(child, Commute)
                ]
                stack += [
                    _Visit(child, name, visit.role, name, group, True)
                    for name, child in zip(below, node.operands, strict=True)
                ][::-1]
            case _:
                role = node.role if isinstance(node, Message) else visit.role
                reading.num_messages += isinstance(node, Message)
                stack += [
                    _Visit(child, name, role, visit.operand, visit.group)
                    for name, child in zip(below, children(node), strict=True)
                ][::-1]
    reading.groups = [Group(name, tuple(operands)) for name, operands in members.items()]
    return reading
