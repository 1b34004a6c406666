"""Text that stands where messages do is a user's message."""

from __future__ import annotations

from spanflow.ir.nodes import Commute, Fragment, Generate, Message, Node, Retrieve, Seq, Text
from spanflow.ir.walk import with_children
from spanflow.optimizer.rule import RuleSet


def bare_text(node: Generate) -> Node | None:
    """`G("a") = G(U("a"))`

    The same wherever text stands below ordered joins and commutes, up to the next message or generate. A commute of
    nothing but text is one message; as an operand of another commute it is no message of its own, since its operands
    are operands of that one. A commute in which an unanswered retrieve stands among text waits for the answer.
    """
    query = _said(node.query)
    return None if query is node.query else with_children(node, (query,))


BARE_TEXT: RuleSet = (bare_text,)


def _said(query: Node) -> Node:
    """The query with its bare texts as messages; the query itself where there is none."""
    if not isinstance(query, Seq | Commute):
        return _as_message(query)
    if not _has_bare_text(query):
        return query
    text_joins = _text_joins(query)
    results: list[Node] = []
    stack: list[tuple[Node, bool, bool]] = [(query, False, False)]
    while stack:
        node, in_commute, done = stack.pop()
        if not isinstance(node, Seq | Commute):
            results.append(_as_message(node))
        elif done:
            first = len(results) - len(node.operands)
            results[first:] = [with_children(node, results[first:])]
        elif isinstance(node, Commute) and not in_commute and id(node) in text_joins:
            results.append(_as_message(node) if text_joins[id(node)] else node)
        else:
            stack.append((node, in_commute, True))
            stack += [(operand, isinstance(node, Commute), False) for operand in reversed(node.operands)]
    return results[0]


def _has_bare_text(query: Seq | Commute) -> bool:
    stack = [query]
    while stack:
        for operand in stack.pop().operands:
            if isinstance(operand, Seq | Commute):
                stack.append(operand)
            elif isinstance(operand, Text | Fragment) and operand.text:
                return True
    return False


def _as_message(node: Node) -> Node:
    match node:
        case Text(text="") | Fragment(text=""):
            return node
        case Text() | Fragment() | Commute():
            return Message("user", (node,))
        case _:
            return node


def _text_joins(query: Node) -> dict[int, bool]:
    """The ids of joins that hold text alone, and whether they say anything now.

    An unanswered retrieve will be text; until then nothing is known of what such a join says.
    """
    found: dict[int, bool] = {}
    waiting: set[int] = set()
    stack: list[tuple[Node, bool]] = [(query, False)]
    while stack:
        node, done = stack.pop()
        if not isinstance(node, Seq | Commute):
            continue
        if not done:
            stack.append((node, True))
            stack += [(operand, False) for operand in node.operands if isinstance(operand, Seq | Commute)]
        elif all(isinstance(o, Text | Fragment | Retrieve) or id(o) in found for o in node.operands):
            if any(isinstance(o, Retrieve) or id(o) in waiting for o in node.operands):
                waiting.add(id(node))
            found[id(node)] = id(node) not in waiting and any(
                found[id(o)] if isinstance(o, Seq | Commute) else o.text != ""  # type: ignore[attr-defined]
                for o in node.operands
            )
    return found
