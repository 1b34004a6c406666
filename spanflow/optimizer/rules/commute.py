"""The commute is associative, and nothing to one operand that asks for nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from spanflow.ir.nodes import DEFAULT_SEPARATOR, Chat, Commute, Generate, Message, Node, Seq
from spanflow.ir.walk import with_children
from spanflow.optimizer.rule import RuleSet
from spanflow.optimizer.rules.level import asks_nothing, check_width, holds_messages, may_leave_seq, sole_operand


def flatten_commute(node: Commute) -> Node | None:
    """`+[a, +[b, c]] = +[a, b, c]`

    Where the inner one asks for nothing that the outer one does not: its rung and its anchor are the same or unset,
    its separator is the same or follows nothing, and it is not associative where the outer one is not. The inner one
    may stand in ordered joins that come to nothing but it.
    """
    if _inner(node.operands, node) is None:
        return None
    flat: list[Node] = []
    stack = list(reversed(node.operands))
    while stack:
        operand = stack.pop()
        if (inner := _inner((operand,), node)) is not None:
            stack += reversed(inner.operands)
        else:
            flat.append(operand)
            check_width(flat)
    return with_children(node, flat)


def only_commute(node: Commute) -> Commute | None:
    """`+[+[a, b]] = +[a, b]`

    The options that are set hold, those of the inner one first; the separator is the inner one's, since the outer
    one would follow text alone.
    """
    inner = sole_operand(node)
    if not isinstance(inner, Commute):
        return None
    rung, anchor, associative = node.rung, node.anchor, node.associative
    while isinstance(inner, Commute):
        node = inner
        rung, anchor = node.rung or rung, node.anchor or anchor
        associative = associative or node.associative
        inner = sole_operand(node)
    return Commute(node.operands, rung, anchor, associative, node.separator)


def single_commute(node: Commute) -> Node | None:
    """`+[a] = a`

    Where `a` is a message, or an ordered join of messages, and the commute asks for nothing: a rung or an anchor asks
    to reuse `a`, and an associative commute may be judged. A part of a message stays in its commute, which puts a
    separator behind it; an answer stays in one, too, to be taken over as a span: `+[✶[a, g]] = ✶[a, +[g]]`.
    """
    match _only(node):
        case Message() as a:
            return a
        case Seq() as a if holds_messages(a):
            return Seq(_each(a))
        case _:
            return None


def no_separator(node: Commute) -> Node | None:
    """`+[U, ..., separator] = +[U, ...]`

    Separators follow text inside a message. Between whole messages they mean nothing.
    """
    if node.separator == DEFAULT_SEPARATOR or not holds_messages(node):
        return None
    return replace(node, separator=DEFAULT_SEPARATOR)


COMMUTE: RuleSet = (no_separator, flatten_commute, only_commute, single_commute)


def _inner(operands: Iterable[Node], outer: Commute) -> Commute | None:
    """The first commute among operands that may be spliced into the outer one, as the other laws leave it."""
    for operand in operands:
        inner: Node | None = operand
        while isinstance(inner, Seq):
            inner = sole_operand(inner)
        if isinstance(inner, Commute) and (not isinstance(operand, Seq) or may_leave_seq(inner)):
            inner = only_commute(inner) or inner
            if joins(inner, outer):
                return inner
    return None


def _only(node: Node) -> Node | None:
    """The operand of a commute of one that asks for nothing; None where it is something else."""
    return sole_operand(node) if isinstance(node, Commute) and asks_nothing(node) else None


def _each(seq: Seq) -> tuple[Node, ...]:
    """The operands of a join of messages that was alone in a commute, its answers in commutes of their own.

    Commutes of one in it are opened at once, however deep they are nested.
    """
    each: list[Node] = []
    stack = list(reversed(seq.operands))
    while stack:
        node = stack.pop()
        match _only(node):
            case Message() as a:
                each.append(a)
                continue
            case Seq() as a if holds_messages(a):
                stack += reversed(a.operands)
                continue
        if isinstance(node, Seq):
            stack += reversed(node.operands)
        else:
            each.append(Commute((node,)) if isinstance(node, Generate | Chat) else node)
        check_width(each)
    return tuple(each)


def joins(inner: Commute, outer: Commute) -> bool:
    """Whether the operands of a commute may become operands of the one of which it is an operand."""
    return (
        inner.rung in (None, outer.rung)
        and inner.anchor in (None, outer.anchor)
        and (inner.separator == outer.separator or holds_messages(inner))
        and (outer.associative or not inner.associative)
    )
