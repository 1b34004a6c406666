"""Rewrites keep what a query means, and doing them again changes nothing."""

from __future__ import annotations

from hypothesis import given
from strategies import queries

from spanflow.ir.denotation import denote
from spanflow.ir.nodes import Node, Seq
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
