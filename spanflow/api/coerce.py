"""What authors write becomes nodes: text, nodes, and lists of them. Anything else is refused where it stands."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from numbers import Real
from typing import Any, TypeAlias

from spanflow.errors import QueryError
from spanflow.ir.fidelity import Anchor, Rung, as_anchor, as_rung
from spanflow.ir.nodes import Node, Seq, Text
from spanflow.ir.numbers import shown_number
from spanflow.ir.ranges import check_text

#: What stands for a node: a node, text, or a list, tuple or generator of them (an ordered join).
Operand: TypeAlias = "Node | str | Iterable[Operand]"

_MAX_NESTING = 100
_EXPECTED = "text, a node (from user(), fragment(), commute(), ...), or a list of them"


def as_text(value: object, where: str) -> str:
    """Plain text, of exactly the type str. Raises QueryError."""
    check_text(value, where)
    return str.__str__(value)  # a subclass may carry more, or print as something else


def as_node(value: object, where: str, nesting: int = 0) -> Node:
    """A node from a node, from text, or from a list of them (a `Seq`). Raises QueryError."""
    if isinstance(value, Node):
        return value
    if isinstance(value, str):
        return Text(as_text(value, where))
    if nesting >= _MAX_NESTING:
        raise QueryError(f"{where}: lists are nested more than {_MAX_NESTING} deep; does one contain itself?")
    return Seq(as_nodes(value, where, nesting + 1))


def as_nodes(values: object, where: str, nesting: int = 0) -> tuple[Node, ...]:
    """The nodes of a list, tuple or generator, in order. Raises QueryError."""
    if not isinstance(values, Iterable) or isinstance(values, Mapping | Set | bytes | bytearray | memoryview):
        raise QueryError(f"{where}: expected {_EXPECTED}, got {described(values)}{_advice(values)}")
    return tuple(as_node(value, f"{where}[{index}]", nesting) for index, value in enumerate(values))


def as_arguments(values: tuple[object, ...], function: str) -> tuple[Node, ...]:
    """The positional arguments of one of the combinators as nodes. Raises QueryError that counts from 1."""
    return tuple(as_node(value, f"{function}(): argument {number}") for number, value in enumerate(values, 1))


def as_fidelity(rung: Rung | str | None, anchor: str | None, function: str) -> tuple[Rung | None, Anchor | None]:
    """Rung and anchor from their names; None stays None. Raises QueryError."""
    return (
        None if rung is None else as_rung(rung, f"{function}(): rung"),
        None if anchor is None else as_anchor(anchor, f"{function}(): anchor"),
    )


def as_whole(value: Any) -> Any:
    """A plain int from any kind of whole number; what is none passes through, for the range check to refuse."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def as_real(value: Any) -> Any:
    """A plain float from any kind of real number; what is none passes through, for the range check to refuse."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def described(value: object) -> str:
    """A value in an error message: its type, and itself where it is short."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        shown = shown_number(value)
        return shown if shown.startswith("a ") else f"the number {shown}"
    return f"a value of type {type(value).__name__}"


def _advice(value: object) -> str:
    match value:
        case None:
            return "; is a value missing, or a return?"
        case bool() | int() | float():
            return "; write str(...) around it to say it in words"
        case bytes() | bytearray() | memoryview():
            return "; decode it first, for example with .decode('utf-8')"
        case Mapping():
            return "; chat() reads messages with 'role' and 'content'"
        case Set():
            return "; the order of a set changes from run to run: sort it into a list"
        case _ if hasattr(value, "page_content"):
            return (
                "; fragment(document.page_content, id=..., metadata=document.metadata) makes a fragment of a document"
            )
        case _ if hasattr(value, "__await__") or hasattr(value, "__aiter__"):
            return "; await it first"
        case _ if callable(value):
            return "; was it meant to be called?"
        case _:
            return ""
