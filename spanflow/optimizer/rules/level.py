"""What a join is made of: whole messages, or parts of one."""

from __future__ import annotations

from spanflow.errors import QueryError
from spanflow.ir.nodes import Commute, Fragment, Message, Node, Seq, Text

#: Joins that are looked into for a message. Where none is found among so many, laws that need to know wait: without
#: a bound, a deep nest of joins would be searched anew from each of its levels.
_MAX_JOINS = 16
_TEXTS = (Text, Fragment)
#: Operands that a join may come to have by flattening. A tree that shares subtrees can spell more than memory holds.
MAX_OPERANDS = 250_000


def holds_messages(join: Seq | Commute) -> bool:
    """Whether a join is known to join messages, and not parts of a message. False where it is not known."""
    joins = [join]
    for inner in joins:
        for operand in inner.operands:
            if isinstance(operand, Message):
                return True
            if isinstance(operand, Seq | Commute) and len(joins) < _MAX_JOINS:
                joins.append(operand)
    return False


def is_unit(node: Node) -> bool:
    """Whether a node adds nothing to any join: empty text, or a join of nothing."""
    if isinstance(node, _TEXTS):
        return not node.text
    return isinstance(node, Seq) and not node.operands


def sole_operand(join: Seq | Commute) -> Node | None:
    """The one operand of a join that adds something to it; None where there are more, or none."""
    sole: Node | None = None
    for operand in join.operands:
        if is_unit(operand):
            continue
        if sole is not None:
            return None
        sole = operand
    return sole


def asks_nothing(commute: Commute) -> bool:
    """Whether a commute has no option that says how its operands are treated."""
    return commute.rung is None and commute.anchor is None and not commute.associative


def may_leave_seq(commute: Commute) -> bool:
    """Whether `✶[+[...]]` is known to be `+[...]` wherever it stands. False where it is not known.

    In a commute around it, its separators and its options, and those of commutes that are operands of it, would mean
    something else: so only where it joins messages, and none of these asks for anything.
    """
    commutes = [commute]
    for inner in commutes:
        if not asks_nothing(inner) or len(commutes) > _MAX_JOINS:
            return False
        commutes += [operand for operand in inner.operands if isinstance(operand, Commute)]
    return holds_messages(commute)


def check_width(operands: list[Node]) -> None:
    """Refuse a join that has grown out of all bounds. Raises QueryError."""
    if len(operands) > MAX_OPERANDS:
        raise QueryError(
            f"written out, this join has more than {MAX_OPERANDS:,} operands; is a subtree used inside itself again "
            "and again?"
        )
