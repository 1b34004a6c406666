"""Walks visit each node once in reading order, name it by a path that leads to it, and bear any depth."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st
from strategies import queries

from spanflow.ir.nodes import Chat, Commute, Generate, Message, Node, Seq, Text
from spanflow.ir.walk import children, fold, holds, preorder, rebuild, with_children

A, B = Text("a"), Text("b")


def follow(root: Node, path: str) -> object:
    """What a path as written in an error message leads to."""
    node: object = root
    for name, index in re.findall(r"\.(\w+)(?:\[(\d+)\])?", path):
        node = getattr(node, name)
        node = node[int(index)] if index else node  # type: ignore[index]
    return node


@given(queries())
def test_paths_lead_to_their_nodes(root: Node) -> None:
    paths = [path for path, node in preorder(root) if follow(root, path) is node]
    assert len(paths) == len(set(paths)) == sum(1 for _ in preorder(root))


@given(queries())
def test_fold_sees_what_preorder_sees(root: Node) -> None:
    def count(node: Node, below: list[object]) -> object:
        assert len(below) == len(children(node))
        return 1 + sum(below)  # type: ignore[arg-type]

    assert fold(root, count) == sum(1 for _ in preorder(root))


@given(queries())
def test_rebuilding_without_a_change_gives_the_very_same_tree(root: Node) -> None:
    assert rebuild(root, lambda node: node) is root


def says(node: Node) -> bool | None:
    """There is an `a` that is no part of a user's message."""
    if isinstance(node, Text):
        return node.text == "a"
    return False if isinstance(node, Message) and node.role == "user" else None


@given(st.lists(queries(), min_size=1, max_size=3))
def test_holds_is_any_of_all_below(roots: list[Node]) -> None:
    def expected(node: Node) -> bool:
        said = says(node)
        return any(map(expected, children(node))) if said is None else said

    known: dict[bytes, bool] = {}
    for root in roots:
        assert holds(root, says) == expected(root)
        assert holds(root, says, known) == holds(root, says, known) == expected(root)


def test_what_is_shared_is_searched_once() -> None:
    asked: list[Node] = []

    def note(node: Node) -> bool | None:
        asked.append(node)
        return False if isinstance(node, Text) else None

    root: Node = B
    for _ in range(60):
        root = Seq((root, root))
    known: dict[bytes, bool] = {}
    assert not holds(root, note, known)
    assert len(asked) < 200
    asked.clear()
    assert not holds(Seq((root, A)), note, known)
    assert len(asked) == 3


def test_order_and_spelling_of_paths() -> None:
    root = Generate(Seq((Message("user", (A, Commute((A, B)))), Chat((Message("user", (B,)),)))))
    assert [path for path, _ in preorder(root)] == [
        "$",
        "$.query",
        "$.query.operands[0]",
        "$.query.operands[0].parts[0]",
        "$.query.operands[0].parts[1]",
        "$.query.operands[0].parts[1].operands[0]",
        "$.query.operands[0].parts[1].operands[1]",
        "$.query.operands[1]",
        "$.query.operands[1].messages[0]",
        "$.query.operands[1].messages[0].parts[0]",
    ]


def test_with_children_keeps_everything_else() -> None:
    node = Commute((A, B), None, "head", True, "-")
    changed = with_children(node, (B,))
    assert changed == Commute((B,), None, "head", True, "-")
    assert with_children(node, (A, B)) is node


def test_rebuild_works_bottom_up() -> None:
    root = Seq((Seq((A,)), B))
    seen: list[Node] = []

    def note(node: Node) -> Node:
        seen.append(node)
        return Text("c") if node == A else node

    assert rebuild(root, note) == Seq((Seq((Text("c"),)), B))
    assert seen == [A, Seq((Text("c"),)), B, Seq((Seq((Text("c"),)), B))]


def test_a_deep_tree_is_walked_and_rebuilt() -> None:
    root: Node = A
    for _ in range(5_000):
        root = Seq((root, B))
    assert sum(1 for _ in preorder(root)) == 10_001
    other = rebuild(root, lambda node: Text("c") if node == A else node)
    assert other != root
    assert fold(other, lambda node, below: 1 + max(below, default=0)) == 5_001  # type: ignore[call-overload]
