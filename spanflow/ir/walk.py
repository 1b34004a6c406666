"""Iterative walks over a tree: no recursion, so depth is bounded by memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import assert_never

from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Query, Retrieve, Seq, Text

ROOT = "$"


def children(node: Node) -> tuple[Node, ...]:
    """The children of a node in order; leaves have none."""
    query: Query = node  # type: ignore[assignment]
    match query:
        case Message(parts=parts):
            return parts
        case Seq(operands=operands) | Commute(operands=operands):
            return operands
        case Text() | Fragment() | Retrieve():
            return ()
        case Generate(query=inner):
            return (inner,)
        case Chat(messages=messages):
            return messages
        case _:
            assert_never(query)


def child_path(node: Node, path: str, index: int) -> str:
    """The path of the child at `index`, as in `$.query.operands[2]`."""
    match node:
        case Message():
            return f"{path}.parts[{index}]"
        case Generate():
            return f"{path}.query"
        case Chat():
            return f"{path}.messages[{index}]"
        case _:
            return f"{path}.operands[{index}]"


def with_children(node: Node, new: Sequence[Node]) -> Node:
    """The same node over other children; the node itself where nothing changed."""
    old = children(node)
    if len(old) == len(new) and all(a is b for a, b in zip(old, new, strict=True)):
        return node
    query: Query = node  # type: ignore[assignment]
    match query:  # the constructors themselves: dataclasses.replace takes several times as long
        case Message(role=role):
            return Message(role, tuple(new))
        case Seq():
            return Seq(tuple(new))
        case Commute():
            return Commute(tuple(new), query.rung, query.anchor, query.associative, query.separator)
        case Generate():
            (inner,) = new
            return Generate(inner, query.sampling, query.n, query.model, query.reduce, query.arity)
        case Chat():
            return Chat(tuple(new), query.sampling)
        case Text() | Fragment() | Retrieve():
            return query
        case _:
            assert_never(query)


def preorder(root: Node, path: str = ROOT) -> Iterator[tuple[str, Node]]:
    """Each (path, node), parents before children, in reading order."""
    stack = [(path, root)]
    while stack:
        here, node = stack.pop()
        yield here, node
        below = children(node)
        stack.extend((child_path(node, here, i), below[i]) for i in range(len(below) - 1, -1, -1))


def fold(root: Node, build: Callable[[Node, list[object]], object]) -> object:
    """Bottom-up: `build(node, results of its children)`; returns the root's result."""
    results: list[object] = []
    stack: list[tuple[Node, bool]] = [(root, False)]
    while stack:
        node, done = stack.pop()
        below = children(node)
        if done or not below:
            first = len(results) - len(below)
            results[first:] = [build(node, results[first:])]
        else:
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(below))
    return results[0]


def rebuild(root: Node, change: Callable[[Node], Node]) -> Node:
    """Bottom-up map: `change` sees each node with its children already changed."""

    def build(node: Node, below: list[object]) -> object:
        return change(with_children(node, below))  # type: ignore[arg-type]

    return fold(root, build)  # type: ignore[return-value]
