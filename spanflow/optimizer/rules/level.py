"""What a join is made of: whole messages, or parts of one."""

from __future__ import annotations

from spanflow.errors import QueryError
from spanflow.ir.nodes import Commute, Fragment, Message, Node, Seq, Text

#: Joins that are looked into for a message. Where none is found among so many, laws that need to know wait: without
#: a bound, a deep nest of joins would be searched anew from each of its levels.
_MAX_JOINS = 64
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
    match node:
        case Text(text=text) | Fragment(text=text):
            return not text
        case Seq(operands=operands):
            return not operands
        case _:
            return False


def check_width(operands: list[Node]) -> None:
    """Refuse a join that has grown out of all bounds. Raises QueryError."""
    if len(operands) > MAX_OPERANDS:
        raise QueryError(
            f"written out, this join has more than {MAX_OPERANDS:,} operands; is a subtree used inside itself again "
            "and again?"
        )
