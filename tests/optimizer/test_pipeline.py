"""The passes together: the cases of the language, the trace, and verification around each pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from strategies import shelf

from spanflow import assistant, chat, commute, fragment, generate, retrieve, seq, system, user
from spanflow.errors import OptimizerError, QueryError
from spanflow.ir.nodes import Commute, Generate, Message, Node, Seq, Text
from spanflow.ir.verify import Verified, verify
from spanflow.optimizer.passes import DEFAULT, SIMPLIFY, Pass
from spanflow.optimizer.pipeline import optimise, simplify
from spanflow.optimizer.trace import Step

A, B, C, Z = (user(text) for text in "abcz")


@pytest.mark.parametrize(
    ("written", "simple"),
    [
        (seq(A), A),
        (seq(seq(A)), A),
        (seq(A, seq(B, C)), seq(A, B, C)),
        (seq("", B), B),
        (commute(commute(A, B), commute(C)), commute(A, B, C)),
        (commute(Z, commute(A, B)), commute(Z, A, B)),
        (commute(commute(A)), A),
        (commute(A), A),
        (generate(seq(A, commute(seq(A, seq(B, C)), Z))), generate(seq(A, commute(seq(A, B, C), Z)))),
        (user(seq("a", seq("b", "c"))), user("a", "b", "c")),
        (commute(seq(A, seq(B, C)), seq(Z, seq(A, B))), commute(seq(A, B, C), seq(Z, A, B))),
        (seq(commute(A), commute(seq(B))), seq(A, B)),
        (seq("", seq(""), commute("")), Text("")),
        (fragment("", id="d"), Text("")),
    ],
)
def test_simplify(written: Node, simple: Node) -> None:
    assert simplify(written) == simple
    assert simplify(simple) == simple


def test_a_seq_is_one_operand_first_and_last() -> None:
    first = simplify(commute(seq(A, B), C))
    last = simplify(commute(C, seq(A, B)))
    assert first == commute(seq(A, B), C)
    assert last == commute(C, seq(A, B))


def test_two_generates_keep_role_and_template() -> None:
    both = commute(generate(seq(system("s1"), user("u"))), generate(seq(system("s2"), user("u"))))
    root = generate(seq(system("s"), both, user("Which?")))
    assert optimise(root).root is root
    assert simplify(both) is both


def test_a_whole_query() -> None:
    root = generate(
        seq(
            system("Judge."),
            commute(chat([("user", "one")]), commute(chat([("user", "two")]), generate("three", n=2))),
            seq("Which", seq(" is best?", "")),
        )
    )
    assert optimise(root).root == generate(
        seq(
            system("Judge."),
            commute(generate(user("one")), generate(user("two")), generate(user("three"), n=2)),
            user("Which"),
            user(" is best?"),
        )
    )


def test_an_unanswered_retrieve_stays() -> None:
    root = generate(seq(system("s"), commute(retrieve(shelf, "q")), commute("a", retrieve(shelf, "r")), user("q")))
    assert optimise(root).root == root


def test_the_trace() -> None:
    told: list[Step] = []
    root = generate(seq(commute(commute(A, B)), chat([C]), ""))
    done = optimise(root, trace=told.append)
    assert [each.name for each in done.trace] == ["desugar", "simplify", "distribute", "locality", "order"]
    assert told == list(done.steps)
    assert [(step.pass_name, step.rule, step.path) for step in told] == [
        ("desugar", "chat", "$.query.operands[1]"),
        ("simplify", "drop_units", "$.query"),
        ("simplify", "flatten_commute", "$.query.operands[0]"),
        ("simplify", "single_query", "$.query.operands[1]"),
    ]
    desugared, simple = done.trace[0], done.trace[1]
    assert desugared.root == generate(seq(commute(commute(A, B)), generate(seq(C)), ""))
    assert simple.root == done.root == generate(seq(commute(A, B), generate(C)))
    assert simple.rules == {"drop_units": 1, "flatten_commute": 1, "single_query": 1}
    assert all(each.why for each in done.trace)
    assert desugared.notes() == ()
    assert told[0].before == chat([C]).digest
    assert told[0].after == generate(seq(C)).digest


def test_the_passes_are_named_once_and_say_why_they_stand_where_they_do() -> None:
    assert len({each.name for each in DEFAULT}) == len(DEFAULT)
    assert all(each.why for each in DEFAULT)
    assert all(isinstance(each.rules, tuple) for each in DEFAULT)


def test_passes_can_be_chosen() -> None:
    assert optimise(seq(A), passes=()).root == seq(A)
    assert [each.name for each in optimise(seq(A), passes=(SIMPLIFY,)).trace] == ["simplify"]


def test_what_is_no_query_is_refused_before_anything() -> None:
    with pytest.raises(QueryError, match=r"^\$\.query\.operands\[1\]: commute: there are no operands"):
        optimise(Generate(Seq((A, Commute(())))))


def test_a_pass_that_breaks_the_query_is_named() -> None:
    def break_it(node: Seq) -> Node | None:
        return Seq((Commute(()),)) if node == seq(A, B) else None

    with pytest.raises(
        OptimizerError,
        match=r"^pass 'vandal' made a query that is none: \$\.query\.operands\[0\]: commute: there are no operands; .* "
        r"it is the rules that are wrong, among break_it$",
    ):
        optimise(generate(seq(A, B)), passes=(Pass("vandal", "for this test", (break_it,)),))


def test_it_is_verified_once_for_each_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def count(root: Node, verified: Any = None) -> None:
        seen.append(root.digest)
        verify(root, verified)

    monkeypatch.setattr("spanflow.optimizer.pipeline.verify", count)
    root = generate(seq(commute(commute(A, B)), chat([C])))
    done = optimise(root)
    assert seen == [root.digest, done.trace[0].root.digest, done.trace[1].root.digest]


def test_verified_subtrees_are_judged_at_new_places() -> None:
    verified = Verified()
    twice = generate(A, n=2)
    verify(commute(twice, B), verified)
    verify(generate(commute(twice, twice)), verified)
    with pytest.raises(QueryError, match=r"^\$\.operands\[0\]: generate: n=2 asks for 2 answers"):
        verify(Seq((twice, B)), verified)
    with pytest.raises(QueryError, match=r"^\$\.parts\[0\]: a message stands inside a message"):
        verify(Message("user", (B,)), verified)


def test_history_is_left_alone() -> None:
    root = generate(seq(user("hi"), assistant("no"), user(commute("d1", "d2"), "q")))
    assert optimise(root).root is root
    other = generate(seq(user("hi"), replace(root, sampling=root.sampling), user("q")))
    assert optimise(other).root is other
