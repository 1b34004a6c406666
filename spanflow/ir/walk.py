"""Iterative walks over a tree: no recursion, so depth is bounded by memory alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, assert_never

from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Query, Retrieve, Seq, Text

ROOT = "$"
#: The kinds of nodes without children.
LEAVES: frozenset[type[Node]] = frozenset({Text, Fragment, Retrieve})


def _none(node: Node) -> tuple[Node, ...]:
    return ()


def _query(node: Generate) -> tuple[Node, ...]:
    return (node.query,)


#: A table, since every walk asks this of every node, and `match` over eight classes takes three times as long.
_CHILDREN: Mapping[type[Node], Callable[[Any], tuple[Node, ...]]] = {
    Message: attrgetter("parts"),
    Seq: attrgetter("operands"),
    Commute: attrgetter("operands"),
    Text: _none,
    Fragment: _none,
    Retrieve: _none,
    Generate: _query,
    Chat: attrgetter("messages"),
}


def children(node: Node) -> tuple[Node, ...]:
    """The children of a node in order; leaves have none."""
    return _CHILDREN[type(node)](node)


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


def path_through(steps: Iterable[tuple[Node, int]]) -> str:
    """The path of a node to which these (parent, number of the child) lead; the last step comes first."""
    path = ROOT
    for parent, number in reversed(list(steps)):
        path = child_path(parent, path, number)
    return path


def with_children(node: Node, new: Sequence[Node]) -> Node:
    """The same node over other children; the node itself where nothing changed."""
    old = children(node)
    if len(old) == len(new) and all(map(is_, old, new)):
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


def holds(root: Node, says: Callable[[Node], bool | None], known: dict[bytes, bool] | None = None) -> bool:
    """Whether `says` is true of a node or of any below it: searched for in reading order, up to the first.

    It says False of a node that need not be entered, and None of one in which to search on. `known` remembers what was
    found by digest: given again, what trees share is searched once.
    """
    known = {} if known is None else known
    if (said := says(root)) is not None:
        return said
    if root.digest in known:
        return known[root.digest]
    above = [(root, iter(children(root)))]
    while above:
        node, rest = above[-1]
        for child in rest:
            found = says(child)
            if found is None:
                found = known.get(child.digest)
            if found is None:
                above.append((child, iter(children(child))))
                break
            if found:
                known.update((one.digest, True) for one, _ in above)
                return True
        else:
            known[node.digest] = False
            above.pop()
    return False


def is_answer(node: Node) -> bool | None:
    """Whether a node stands for an answer of the model, as `holds` asks it."""
    if isinstance(node, Generate | Chat):
        return True
    return False if type(node) in LEAVES else None


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
