"""What a tree means, whatever way it is written: the measure by which rewrites are judged.

An ordered join is a sequence, and a commute is a multiset of sequences. A message is a role with the sequence of its
parts; bare text beside messages is a user's message. Joins nest without effect, so they are spliced. Each operand of a
commute carries what holds for it: rung, anchor, whether it may be judged in parts, and inside a message its separator.
A commute of one message that nothing is asked of is that message. Empty text is nothing. An ordered join is one operand
of a commute, also where it holds nothing but another commute; outside of messages it is that commute, if nothing is
asked of that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, assert_never

from spanflow.ir.fidelity import Anchor, Rung
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Query, Retrieve, Seq, Text
from spanflow.ir.walk import children


def denote(root: Node) -> str:
    """The meaning of a tree as text: two trees mean the same exactly if their texts are equal.

    The root is read as something that stands beside messages. The walk does not recurse.

    >>> from spanflow import commute, seq, user
    >>> from spanflow.ir.denotation import denote
    >>> denote(seq(user("a"), seq(commute(user("c"), user("b")))))
    "user⟨'a'⟩ {user⟨'b'⟩ | user⟨'c'⟩}"
    """
    results: list[_Value] = []
    stack: list[tuple[_Visit, bool]] = [(_Visit(root), False)]
    while stack:
        visit, done = stack.pop()
        below = children(visit.node)
        if done:
            first = len(results) - len(below)
            results[first:] = [_meaning(visit, results[first:])]
        else:
            stack.append((visit, True))
            stack += [(inner, False) for inner in reversed(visit.below())]
    return _spelled(results[0])


@dataclass(frozen=True, slots=True)
class _Operand:
    """The meaning of one operand of a commute, and what holds for it."""

    text: str
    rung: Rung | None
    anchor: Anchor | None
    associative: bool
    separator: str | None

    def __str__(self) -> str:
        options = [str(option) for option in (self.rung, self.anchor) if option is not None]
        options += ["associative"] if self.associative else []
        options += [] if self.separator is None else [repr(self.separator)]
        return f"{self.text} [{', '.join(options)}]" if options else self.text


class _Multiset(NamedTuple):
    """The meaning of a commute. `is_open`: nothing is asked of any of it, so that it is the same in an ordered join."""

    operands: tuple[_Operand, ...]
    is_open: bool

    def __str__(self) -> str:
        return "{" + " | ".join(sorted(map(str, self.operands))) + "}"


#: A sequence: texts of messages, parts and generates, and multisets.
_Value: TypeAlias = "Sequence[str | _Multiset]"


def _spelled(value: _Value) -> str:
    return " ".join(map(str, value))


class _Visit(NamedTuple):
    """A node and where it stands: in a message, directly in a commute."""

    node: Node
    in_message: bool = False
    in_commute: bool = False

    def is_one_message(self) -> bool:
        """Whether this is a commute of text alone that stands beside messages: the content of one."""
        return not self.in_message and not self.in_commute and _is_text(self.node)

    def below(self) -> list[_Visit]:
        node = self.node
        in_message = isinstance(node, Message) or (
            isinstance(node, Seq | Commute) and (self.in_message or self.is_one_message())
        )
        return [_Visit(child, in_message, isinstance(node, Commute)) for child in children(node)]


def _is_text(node: Node) -> bool:
    """Whether a node is a commute of nothing but texts and joins of them."""
    if not isinstance(node, Commute):
        return False
    stack: list[Node] = [node]
    while stack:
        inner = stack.pop()
        if isinstance(inner, Seq | Commute):
            stack += inner.operands
        elif not isinstance(inner, Text | Fragment):
            return False
    return True


def _meaning(visit: _Visit, below: Sequence[_Value]) -> _Value:
    node: Query = visit.node  # type: ignore[assignment]
    match node:
        case Text(text=""):
            return []
        case Fragment(text=""):
            return []
        case Text(text=text):
            return _said(visit, repr(text))
        case Fragment(text=text, id=name, metadata=metadata):
            about = "" if name is None and not metadata else f"{name!r}{dict(metadata)!r}"
            return _said(visit, f"F{about}{text!r}")
        case Message(role=role):
            return [f"{role}⟨{_spelled(_spliced(below))}⟩"]
        case Seq():
            return [_sealed(item, visit) for item in _spliced(below)]
        case Commute():
            return _multiset(visit, node, below)
        case Generate(sampling=sampling, n=n, model=model):
            shape = f"{sampling} n={n} model={model}"
            shape += "" if node.reduce is None else f" reduce={node.reduce} arity={node.arity}"
            return [f"G({shape})⟨{_spelled(_spliced(below))}⟩"]
        case Chat(sampling=sampling):
            return [f"G({sampling} n=1 model=None)⟨{_spelled(_spliced(below))}⟩"]
        case Retrieve():
            return [f"R{node.digest.hex()}"]
        case _:
            assert_never(node)


def _said(visit: _Visit, text: str) -> _Value:
    return [text] if visit.in_message else [f"user⟨{text}⟩"]


def _spliced(below: Iterable[_Value]) -> list[str | _Multiset]:
    return [item for value in below for item in value]


def _sealed(item: str | _Multiset, visit: _Visit) -> str | _Multiset:
    """An item of an ordered join: no commute around that may take it apart, but for an open one outside of messages."""
    return item if isinstance(item, _Multiset) and item.is_open and not visit.in_message else str(item)


def _multiset(visit: _Visit, node: Commute, below: Sequence[_Value]) -> _Value:
    in_message = visit.in_message or visit.is_one_message()
    operands: list[_Operand] = []
    alone: _Value = []
    is_open = node.rung is None and node.anchor is None and not node.associative
    for value in below:
        match value:
            case []:
                continue
            case [_Multiset(inner, inner_is_open)]:
                operands += [_within(node, one) for one in inner]
                is_open = is_open and inner_is_open
            case _:
                separator = node.separator if in_message else None
                operands.append(_Operand(_spelled(value), node.rung, node.anchor, node.associative, separator))
        alone = value
    if not operands:
        return []
    if len(operands) == 1 and not in_message and str(operands[0]) == operands[0].text:
        return alone
    found = _Multiset(tuple(operands), is_open)
    return [f"user⟨{found}⟩"] if visit.is_one_message() else [found]


def _within(outer: Commute, operand: _Operand) -> _Operand:
    return replace(
        operand,
        rung=operand.rung or outer.rung,
        anchor=operand.anchor or outer.anchor,
        associative=operand.associative or outer.associative,
    )
