"""Rewrites keep what a query means, and doing them again changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from optimizer.small_trees import Join, small_trees
from strategies import queries

from spanflow.ir.denotation import denote
from spanflow.ir.fidelity import EXACT, MOVED
from spanflow.ir.nodes import Commute, Generate, Message, Node, Seq, Text
from spanflow.ir.text import to_text
from spanflow.ir.verify import verify
from spanflow.optimizer.passes import DEFAULT, LOCALITY
from spanflow.optimizer.pipeline import optimise, simplify

KEEPERS = tuple(each for each in DEFAULT if each is not LOCALITY)


@given(queries(max_leaves=20))
def test_meaning(root: Node) -> None:
    done = optimise(root, passes=KEEPERS)
    assert denote(done.root) == denote(root)
    verify(done.root)


@given(queries(max_leaves=20))
def test_again_changes_nothing(root: Node) -> None:
    once = optimise(root, passes=KEEPERS).root
    again = optimise(once, passes=KEEPERS)
    assert again.root == once
    assert again.steps == ()


@given(queries(max_leaves=20))
def test_simplify_alone(root: Node) -> None:
    once = simplify(root)
    assert denote(once) == denote(root)
    assert simplify(once) == once
    if getattr(root, "n", 1) == 1:  # several samples stand directly in a commute
        assert simplify(Seq((root,))) == once


A = Message("user", (Text("a"),))
NOTHING, ANSWER = Text(""), Generate(A)
JOINS: tuple[Join, ...] = (Seq, Commute, lambda operands: Commute(operands, MOVED))


def check(roots: Iterable[Node]) -> int:
    num_checked = 0
    for root in roots:
        done = optimise(root, passes=KEEPERS).root
        assert denote(done) == denote(root), to_text(root)
        assert optimise(done, passes=KEEPERS).steps == (), to_text(root)
        num_checked += 1
    return num_checked


def test_all_small_trees_of_messages() -> None:
    assert check(small_trees([A, NOTHING, ANSWER], JOINS, 5)) == 3_873


def test_all_small_trees_in_a_message() -> None:
    joins: tuple[Join, ...] = (*JOINS, lambda operands: Commute(operands, separator="-"))
    trees = small_trees([Text("t"), NOTHING], joins, 4)
    assert check(Generate(Seq((A, Message("user", (Text("t"), tree))))) for tree in trees) == 410


def test_all_small_trees_of_commutes_that_ask_for_something() -> None:
    joins: tuple[Join, ...] = (
        *JOINS,
        lambda operands: Commute(operands, EXACT),
        lambda operands: Commute(operands, anchor="none"),
        lambda operands: Commute(operands, associative=True),
    )
    assert check(Generate(Seq((tree, A))) for tree in small_trees([A, NOTHING], joins, 4)) == 1_022
