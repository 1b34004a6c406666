"""What the written forms share: a tree is checked, its retrievers get names, and errors say where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from spanflow.errors import QueryError
from spanflow.ir.limits import MAX_CHARS, MAX_DEPTH, MAX_NODES
from spanflow.ir.nodes import Node
from spanflow.ir.verify import verify
from spanflow.ir.walk import children, fold, preorder

T = TypeVar("T")


def write(root: Node, build: Callable[[Node, list[T]], T]) -> T:
    """Bottom-up: what `build` makes of a node and of what it made of its children, for the root.

    Raises QueryError where `verify` does, for a tree that is too large, and, with the path of the node, where `build`
    does.
    """
    verify(root)
    check_size(root)

    def build_here(node: Node, below: list[object]) -> object:
        try:
            return build(node, below)  # type: ignore[arg-type]
        except QueryError as error:
            raise QueryError(f"{path_of(root, node)}: {error}") from None

    return fold(root, build_here)  # type: ignore[return-value]


def check_size(root: Node) -> None:
    """Refuse a tree that has too many nodes or levels to be written out. Raises QueryError.

    A subtree that stands at many places is written at each of them, so few nodes in memory can be many on paper.
    """
    num_nodes = 0
    stack = [(root, 1)]
    while stack:
        node, depth = stack.pop()
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise QueryError(
                f"$: written out, this query has more than {MAX_NODES:,} nodes or {MAX_DEPTH:,} levels; a subtree "
                "that stands at many places counts at each. Write its parts one by one"
            )
        stack.extend((child, depth + 1) for child in children(node))


def check_length(text: str) -> str:
    """The same text, refused where it is too long to be read again. Raises QueryError."""
    if len(text) > MAX_CHARS:
        raise QueryError(
            f"$: written out, this query has {len(text):,} characters, and at most {MAX_CHARS:,} are read at once; "
            "write its parts one by one"
        )
    return text


def path_of(root: Node, node: Node) -> str:
    """The first path at which this very node stands."""
    return next(path for path, found in preorder(root) if found is node)


class RetrieverNames:
    """What retrievers are called: as in the mapping, or without one by the name of their function or class."""

    def __init__(self, retrievers: Mapping[str, Any] | None) -> None:
        self._retrievers = retrievers
        self._taken: dict[str, Any] = {}

    def name(self, retriever: Any) -> str:
        """The name of a retriever. Raises QueryError where it has none of its own."""
        if self._retrievers is not None:
            for name, known in self._retrievers.items():
                if known is retriever:
                    return name
            known_names = ", ".join(map(repr, self._retrievers)) or "none"
            raise QueryError(
                f"retrieve: this retriever, a {type(retriever).__name__}, is none of those in retrievers= (known: "
                f"{known_names}); add it under a name"
            )
        own = getattr(retriever, "__name__", None)
        name = own if isinstance(own, str) and own else type(retriever).__name__
        if self._taken.setdefault(name, retriever) is not retriever:
            raise QueryError(f"retrieve: two retrievers are called {name!r}; name them: retrievers={{'name': ...}}")
        return name
