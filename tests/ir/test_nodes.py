"""Nodes compare, hash and print by their digest, at any depth, and take nothing but nodes as children."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields, replace
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from strategies import drawer, queries, shelf

from spanflow.errors import QueryError
from spanflow.ir.fidelity import EXACT, MOVED, repair
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Sampling, Seq, Text
from spanflow.ir.walk import children, rebuild, with_children

A, B = Text("a"), Text("b")
DEPTH = 5_000


def chain(depth: int) -> Node:
    node: Node = A
    for level in range(depth):
        node = Seq((node,)) if level % 2 else Commute((node,))
    return node


def test_equal_trees_are_equal_and_hash_alike() -> None:
    one = Generate(Seq((Message("system", (A,)), Commute((Fragment("f", "1"), B), MOVED, "head"))), Sampling(8))
    two = Generate(Seq((Message("system", (A,)), Commute((Fragment("f", "1"), B), MOVED, "head"))), Sampling(8))
    assert one is not two
    assert one == two
    assert len({one, two}) == 1
    assert one != "text"


def test_a_fragment_stays_as_it_was_whoever_made_its_metadata() -> None:
    metadata: dict[str, Any] = {"page": 1, "tags": ["a", {"deep": (1, [2])}], "frozen": MappingProxyType({"b": [3]})}
    made = Fragment("text", "1", metadata)
    before = json.dumps(made.metadata)
    assert before == '{"page": 1, "tags": ["a", {"deep": [1, [2]]}], "frozen": {"b": [3]}}'
    metadata["page"] = 2
    metadata["tags"][1]["deep"][1].append(4)
    metadata["frozen"]["b"].append(4)
    assert json.dumps(made.metadata) == before
    assert replace(made, text="text") == made


@pytest.mark.parametrize(
    ("node", "field", "other"),
    [
        (A, "text", "b"),
        (Fragment("a", "1", {"page": 1}), "text", "b"),
        (Fragment("a", "1", {"page": 1}), "id", None),
        (Fragment("a", "1", {"page": 1}), "metadata", {"page": 2}),
        (Message("user", (A,)), "role", "system"),
        (Message("user", (A,)), "parts", (B,)),
        (Seq((A, B)), "operands", (B, A)),
        (Commute((A, B)), "operands", (B, A)),
        (Commute((A,)), "rung", EXACT),
        (Commute((A,), repair(8)), "rung", repair(9)),
        (Commute((A,)), "anchor", "head"),
        (Commute((A,)), "associative", True),
        (Commute((A,)), "separator", "\n"),
        (Generate(A), "query", B),
        (Generate(A), "sampling", Sampling(seed=1)),
        (Generate(A), "n", 2),
        (Generate(A), "model", "m"),
        (Generate(A), "reduce", "tree"),
        (Generate(A), "arity", 3),
        (Retrieve(shelf, "q"), "retriever", drawer),
        (Retrieve(shelf, "q"), "query", "r"),
        (Retrieve(shelf, "q"), "k", 1),
        (Retrieve(shelf, "q"), "rung", MOVED),
        (Retrieve(shelf, "q"), "anchor", "none"),
        (Chat((A,)), "messages", (B,)),
        (Chat((A,)), "sampling", Sampling(temperature=1.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_each_field_is_part_of_identity(node: Any, field: str, other: object) -> None:
    changed = replace(node, **{field: other})
    assert changed != node
    assert replace(changed, **{field: getattr(node, field)}) == node


def test_no_field_is_forgotten_above() -> None:
    listed = test_each_field_is_part_of_identity.pytestmark[0].args[1]  # type: ignore[attr-defined]
    checked = {(type(node), field) for node, field, _ in listed}
    kinds = (Text, Fragment, Message, Seq, Commute, Generate, Retrieve, Chat)
    assert checked == {(kind, f.name) for kind in kinds for f in fields(kind) if f.name != "digest"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Seq((A, B)), Seq((Seq((A, B)),))),
        (Seq((Text("ab"),)), Seq((A, B))),
        (Seq((A,)), Commute((A,))),
        (Text("a"), Fragment("a")),
        (Seq(()), Text("")),
        (Fragment("ab", "c"), Fragment("a", "bc")),
        (Message("user", (A,)), Chat((A,))),
    ],
)
def test_different_shapes_never_meet(one: Node, other: Node) -> None:
    assert one != other


def test_a_long_chain_builds_compares_hashes_and_prints() -> None:
    one, two, longer = chain(DEPTH), chain(DEPTH), chain(DEPTH + 1)
    assert one == two
    assert hash(one) == hash(two)
    assert one != longer
    assert repr(one).startswith("<Seq ")
    assert len(repr(one)) < 40


def test_nodes_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        A.text = "b"  # type: ignore[misc]
    with pytest.raises((AttributeError, TypeError)):
        A.other = "b"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Text(5), "Text.text must be text, got int"),
        (lambda: Fragment(None), "Fragment.text must be text, got NoneType"),
        (lambda: Message("user", ("a",)), r"Message.parts\[0\] must be a node of a query, got str"),
        (lambda: Message(None, (A,)), "Message.role must be text, got NoneType"),
        (lambda: Seq((A, ["b"])), r"Seq.operands\[1\] must be a node of a query, got list"),
        (lambda: Commute((A, None)), r"Commute.operands\[1\] must be a node of a query, got NoneType"),
        (lambda: Generate("a"), r"Generate.query\[0\] must be a node of a query, got str"),
        (lambda: Chat(({"role": "user"},)), r"Chat.messages\[0\] must be a node of a query, got dict"),
    ],
)
def test_a_child_that_is_no_node_is_refused_when_built(build: Callable[[], Node], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        build()


@given(queries())
def test_a_tree_rebuilt_from_its_parts_is_equal(root: Node) -> None:
    def copied(node: Node) -> Node:
        return replace(node)  # type: ignore[type-var]

    again = rebuild(root, copied)
    assert again == root
    assert again.digest == root.digest


@given(queries())
def test_a_change_of_any_child_changes_the_digest(root: Node) -> None:
    below = children(root)
    for index in range(len(below)):
        changed = with_children(root, (*below[:index], Text("another text than any before"), *below[index + 1 :]))
        assert changed != root
