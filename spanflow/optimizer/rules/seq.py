"""The ordered join is associative, and nothing to one operand."""

from __future__ import annotations

from spanflow.ir.nodes import Commute, Generate, Message, Node, Retrieve, Seq
from spanflow.optimizer.rule import RuleSet
from spanflow.optimizer.rules.level import check_width, may_leave_seq


def flatten_seq(node: Seq) -> Node | None:
    """`✶[a, ✶[b, c]] = ✶[a, b, c]`"""
    flat = _flat(node.operands)
    return None if flat is None else Seq(flat)


def flatten_message(node: Message) -> Node | None:
    """`U[a, ✶[b, c]] = U[a, b, c]`"""
    flat = _flat(node.parts)
    return None if flat is None else Message(node.role, flat)


def single_seq(node: Seq) -> Node | None:
    """`✶[a] = a`

    Where `a` is a commute (or a retrieve, which will be one), only if that may leave the join wherever it stands. In an
    ordered join, in a message and directly in a generate, the other laws take the ✶ away.
    """
    if len(node.operands) != 1:
        return None
    match node.operands[0]:
        case Commute() as a:
            return a if may_leave_seq(a) else None
        case Retrieve():
            return None
        case a:
            return a


def single_query(node: Generate) -> Node | None:
    """`G(✶[a]) = G(a)`"""
    match node.query:
        case Seq(operands=(a,)):
            return Generate(a, node.sampling, node.n, node.model, node.reduce, node.arity)
        case _:
            return None


def single_root(node: Seq) -> Node | None:
    """`✶[a] = a, at the root`"""
    return node.operands[0] if len(node.operands) == 1 else None


SEQ: RuleSet = (flatten_seq, flatten_message, single_seq, single_query)
SEQ_AT_ROOT: RuleSet = (single_root,)


def _flat(operands: tuple[Node, ...]) -> tuple[Node, ...] | None:
    """The operands with those of any depth of ordered joins in their places; None where there is no such join."""
    if Seq not in map(type, operands):
        return None
    flat: list[Node] = []
    stack = list(reversed(operands))
    while stack:
        node = stack.pop()
        if isinstance(node, Seq):
            stack += reversed(node.operands)
        else:
            flat.append(node)
            check_width(flat)
    return tuple(flat)
