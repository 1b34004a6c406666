"""The meaning of a tree: equal for trees written in different ways, different for trees that mean something else."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import queries, shelf

from spanflow import assistant, chat, commute, fragment, generate, retrieve, seq, system, user
from spanflow.ir.denotation import denote
from spanflow.ir.nodes import Commute, Generate, Message, Node, Sampling, Seq, Text
from spanflow.ir.walk import rebuild

A, B, C = user("a"), user("b"), user("c")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (commute(A, B), commute(B, A)),
        (commute(A, commute(B, C)), commute(C, B, A)),
        (seq(A, seq(B, C)), seq(seq(A, B), C)),
        (seq("", A, seq()), A),
        (commute(A), A),
        (commute(seq(A, B)), seq(A, B)),
        (commute(A, seq(commute(B, C))), commute(A, B, C)),
        (user(seq("a", "b")), user("a", "b")),
        (user(commute("a", "b")), user(commute("b", "a"))),
        (seq(A, commute("a", "b")), seq(A, user(commute("b", "a")))),
        (generate("a"), generate(A)),
        (chat([A, B]), generate(seq(A, B))),
        (commute(A, commute(B, rung="moved"), rung="exact"), commute(commute(B, rung="moved"), A, rung="exact")),
        (commute(A, commute(B), rung="exact"), commute(A, B, rung="exact")),
        (commute(A, B, separator="-"), commute(A, B)),
        (commute("a", A), commute(A, A)),
        (
            commute(seq(commute(commute(B, C, rung="moved"))), A, rung="moved"),
            commute(seq(commute(B, C, rung="moved")), A, rung="moved"),
        ),
        (commute(commute(seq(commute(A, rung="moved"))), B), commute(seq(commute(A, rung="moved")), B)),
    ],
    ids=range(18),
)
def test_written_in_another_way(one: Node, other: Node) -> None:
    assert denote(one) == denote(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (seq(A, B), seq(B, A)),
        (seq(A, B), commute(A, B)),
        (commute(A, A), commute(A, A, A)),
        (commute(A, B), commute(A, C)),
        (commute(seq(A, B), C), commute(A, B, C)),
        (commute(seq(A, B), C), commute(seq(B, A), C)),
        (user("a"), assistant("a")),
        (user("a"), system("a")),
        (user("a", "b"), user("b", "a")),
        (seq(A, Message("user", ())), A),
        (user("ab"), user("a", "b")),
        (user("a"), user(fragment("a"))),
        (user(fragment("a", id="1")), user(fragment("a", id="2"))),
        (user(commute("a", "b")), user("a", "b")),
        (user(commute("a")), user("a")),
        (user(commute("a", "b")), user(commute("a", "b", separator="-"))),
        (user(commute("a", seq(commute("b", "c")))), user(commute("a", "b", "c"))),
        (commute(A, B), commute(A, B, rung="moved")),
        (commute(A, B), commute(A, B, anchor="none")),
        (commute(A, B), commute(A, B, associative=True)),
        (commute(A, commute(B, rung="moved")), commute(A, B)),
        (commute(A, rung="moved"), A),
        (generate(A), generate(B)),
        (generate(A), generate(A, n=2)),
        (generate(A), generate(A, temperature=0.5)),
        (generate(A), generate(A, model="m")),
        (generate(A, reduce="tree"), generate(A)),
        (generate(A, reduce="tree"), generate(A, reduce="tree", arity=3)),
        (generate(seq(A, B)), seq(A, generate(B))),
        (user(retrieve(shelf, "a")), user(retrieve(shelf, "b"))),
        (Text("user⟨'a'⟩"), A),
        (commute(seq(commute(B, C, rung="moved")), A, rung="moved"), commute(B, C, A, rung="moved")),
    ],
    ids=range(32),
)
def test_what_means_something_else(one: Node, other: Node) -> None:
    assert denote(one) != denote(other)


@given(queries(max_leaves=16), st.integers(0, 2**32))
def test_the_order_of_a_commute_means_nothing(root: Node, seed: int) -> None:
    random = Random(seed)

    def shuffled(node: Node) -> Node:
        if not isinstance(node, Commute):
            return node
        return replace(node, operands=tuple(random.sample(node.operands, len(node.operands))))

    assert denote(rebuild(root, shuffled)) == denote(root)


@given(queries(max_leaves=16))
def test_a_changed_word_an_option_or_a_role_is_seen(root: Node) -> None:
    def louder(node: Node) -> Node:
        return Text(node.text + "!") if isinstance(node, Text) and node.text else node

    def longer(node: Node) -> Node:
        return replace(node, sampling=Sampling(99_999)) if isinstance(node, Generate) else node

    def other_role(node: Node) -> Node:
        return replace(node, role="assistant") if isinstance(node, Message) else node

    for change in (louder, longer, other_role):
        changed = rebuild(root, change)
        assert (denote(changed) == denote(root)) == (changed == root)


def test_depth_and_width() -> None:
    root: Node = A
    for _ in range(5_000):
        root = Seq((Commute((root,)), B))
    assert denote(root) == denote(Seq((A, *[B] * 5_000)))
    assert denote(commute([user(str(i)) for i in range(2_000)])).count(" | ") == 1_999
