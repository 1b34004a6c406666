"""The driver comes to rest, or says which rules do not; depth and width are no obstacle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from spanflow.errors import OptimizerError, QueryError
from spanflow.ir.nodes import Chat, Commute, Generate, Message, Node, Seq, Text
from spanflow.ir.walk import rebuild
from spanflow.optimizer.driver import rewrite
from spanflow.optimizer.passes import DESUGAR, SIMPLIFY
from spanflow.optimizer.rule import RuleSet
from spanflow.optimizer.trace import Step, short_path

A, B, C = (Message("user", (Text(text),)) for text in "abc")


def text(old: str, new: str) -> Callable[[Text], Node | None]:
    """A rule that turns one text into another."""

    def rule(node: Text) -> Node | None:
        return Text(new) if node.text == old else None

    rule.__name__ = f"{old}_to_{new}"
    return rule


def test_a_pair_that_oscillates_is_named() -> None:
    rules: RuleSet = (text("x", "y"), text("z", "x"), text("y", "x"))
    with pytest.raises(OptimizerError) as failure:
        rewrite(Seq((A, Seq((B, Text("z"))))), rules, name="swing")
    assert str(failure.value) == (
        "pass 'swing': rules 'x_to_y', 'y_to_x' go round in a circle at $.operands[1].operands[1]: after 2 rewrites "
        "the Text is what it was; at least one of these laws must be written in one direction only"
    )
    assert isinstance(failure.value, RuntimeError)


def test_a_circle_through_parent_and_child_is_found() -> None:
    def spoil(node: Seq) -> Node | None:
        return Seq((Text("y"),)) if node.operands == (Text("x"),) else None

    with pytest.raises(OptimizerError, match=r"rules 'spoil', 'y_to_x' go round in a circle at \$\.query: after 2"):
        rewrite(Generate(Seq((Text("x"),))), (spoil, text("y", "x")), name="swing")


def test_a_rule_that_gives_back_what_it_got_is_named() -> None:
    def idle(node: Commute) -> Node | None:
        return replace(node)

    with pytest.raises(OptimizerError, match=r"pass 'rewrite': rule 'idle' goes round in a circle at \$: after 1 rewr"):
        rewrite(Commute((A,)), (idle,))


def test_a_rule_that_grows_runs_into_the_budget_and_is_named() -> None:
    def grow(node: Seq) -> Node | None:
        return Seq((*node.operands, A))

    with pytest.raises(
        OptimizerError,
        match=r"^pass 'swell' does not come to rest: 1,030 rewrites of a query of 3 nodes, 5,030 allowed, and rule "
        r"'grow' still applies, last at \$ to make a Seq of 1,031 operands; a law must make something smaller$",
    ):
        rewrite(Seq((A,)), (grow,), name="swell")


def test_a_rule_that_nests_is_named_with_the_end_of_a_long_path() -> None:
    def nest(node: Message) -> Node | None:
        if len(node.parts) < 2:
            return None
        return Seq((A, Message("user", (Text(f"{node.parts[0].text}!"), B))))  # type: ignore[attr-defined]

    with pytest.raises(
        OptimizerError, match=r"rule 'nest' still applies, last at ….*\.operands\[1\] to make a Seq of 2"
    ):
        rewrite(Message("user", (Text("a"), B)), (nest,), budget=1_000)


def test_a_rule_that_doubles_is_stopped_before_memory_is_full() -> None:
    def double(node: Seq) -> Node | None:
        return Seq(node.operands * 2)

    with pytest.raises(OptimizerError, match=r"11 rewrites of a query of 3 nodes, 5,030 allowed, and rule 'double'"):
        rewrite(Seq((A,)), (double,))


def test_the_budget_can_be_given() -> None:
    rules: RuleSet = (text("x", "y"), text("y", "z"))
    row = Seq((Text("x"), Seq((Text("x"), Text("y")))))
    assert rewrite(row, rules, budget=2).root == Seq((Text("z"), Seq((Text("z"), Text("z")))))
    with pytest.raises(OptimizerError, match="2 rewrites of a query of 5 nodes, 1 allowed"):
        rewrite(row, rules, budget=1)


def test_many_rewrites_are_no_growth() -> None:
    root = Seq(tuple(Commute((Commute((Message("user", (Text(str(i)),)), A)),)) for i in range(3_000)))
    done = rewrite(root, SIMPLIFY.rules)
    assert len(done.steps) == 3_000


def test_equal_subtrees_are_rewritten_once() -> None:
    root = Seq(tuple(Commute((Commute((A, B)),)) for _ in range(100)))
    done = rewrite(root, SIMPLIFY.rules)
    assert done.root == Seq((Commute((A, B)),) * 100)
    assert [step.rule for step in done.steps] == ["flatten_commute"]


def test_a_tree_that_shares_subtrees_without_end() -> None:
    root: Node = Commute((A, B), separator="-")
    for _ in range(60):
        root = Commute((Generate(root), Generate(root)))
    assert len(rewrite(root, SIMPLIFY.rules).steps) == 1


def test_a_join_that_would_fill_memory_is_refused() -> None:
    root: Node = A
    for _ in range(60):
        root = Seq((root, root))
    with pytest.raises(QueryError, match=r"^\$: written out, this join has more than 250,000 operands"):
        rewrite(root, SIMPLIFY.rules)


def test_steps_say_what_happened_where() -> None:
    told: list[Step] = []
    root = Generate(Seq((A, Commute((Commute((B, C)),)), Seq((B, C)))))
    done = rewrite(root, SIMPLIFY.rules, name="simplify", listener=told.append)
    assert told == list(done.steps)
    assert [(step.pass_name, step.rule, step.path) for step in told] == [
        ("simplify", "flatten_seq", "$.query"),
        ("simplify", "flatten_commute", "$.query.operands[1]"),
    ]
    assert told[1].before == Commute((Commute((B, C)),)).digest
    assert told[1].after == Commute((B, C)).digest


def test_nothing_to_do_is_the_same_tree() -> None:
    root = Generate(Seq((A, Commute((B, C)))))
    assert rewrite(root, SIMPLIFY.rules).root is root
    assert rewrite(root, ()).root is root


def test_a_rule_that_refuses_says_where_at_any_depth() -> None:
    def refuse(node: Text) -> Node | None:
        if node.text == "bad":
            raise QueryError("no such thing")
        return None

    root: Node = Seq((A, Text("bad")))
    with pytest.raises(QueryError, match=r"^\$\.query\.operands\[1\]: no such thing$"):
        rewrite(Generate(root), (refuse,))
    for _ in range(100):
        root = Seq((A, root))
    with pytest.raises(QueryError, match=r"^….*\.operands\[1\]: no such thing$"):
        rewrite(root, (refuse,))


def test_short_paths_are_whole() -> None:
    assert short_path("$.query") == "$.query"
    assert short_path("x" * 200, 10) == "…" + "x" * 10


DEPTH = 5_000


def tower(*floors: Callable[[Any], Node], top: Node = A) -> Node:
    for level in range(DEPTH):
        top = floors[level % len(floors)](top)
    return top


@pytest.mark.parametrize(
    ("root", "shape"),
    [
        (tower(lambda e: Seq((A, e))), Seq((A,) * (DEPTH + 1))),
        (tower(lambda e: Seq((e, A))), Seq((A,) * (DEPTH + 1))),
        (tower(lambda e: Commute((A, e))), Commute((A,) * (DEPTH + 1))),
        (tower(lambda e: Commute((e,))), A),
        (tower(lambda e: Commute((e,)), lambda e: Seq((e,))), A),
        (tower(lambda e: Commute((e,)), lambda e: Seq((A, e))), Seq((A,) * (DEPTH // 2 + 1))),
        (tower(lambda e: Seq((e, Text("")))), A),
    ],
    ids=["seq right", "seq left", "commute", "single commute", "single both", "mixed", "units"],
)
def test_depth(root: Node, shape: Node) -> None:
    assert rewrite(root, SIMPLIFY.rules, at_root=SIMPLIFY.at_root).root == shape


@pytest.mark.parametrize(
    "root",
    [tower(lambda e: Commute((A, e)), lambda e: Seq((A, e))), tower(lambda e: Generate(Seq((A, e))))],
    ids=["alternating", "generates"],
)
def test_depth_that_means_something_stays(root: Node) -> None:
    assert rewrite(root, SIMPLIFY.rules).root is root


def test_width() -> None:
    texts = [Message("user", (Text(str(i)),)) for i in range(10_000)]
    nested = Commute(tuple(Seq((Commute((one,)),)) for one in texts))
    assert rewrite(nested, SIMPLIFY.rules).root == Commute(tuple(texts))


def test_messages_are_entered_where_something_is_generated() -> None:
    """What else they hold is nothing to laws about generates."""
    asked = Generate(Chat((A,)))
    inside = Message("user", (Text("Judge:"), Seq((Commute((asked, Text("b"))),)), Text("Which?")))
    root = Generate(Seq((A, inside, Message("user", (Seq((Text("c"),)),)))))
    done = rewrite(root, DESUGAR.rules).root
    operand = Commute((Generate(Generate(Seq((A,)))), Text("b")))
    assert done == rebuild(root, lambda node: operand if isinstance(node, Commute) else node)
    again = rewrite(done, DESUGAR.rules)
    assert again.root is done
