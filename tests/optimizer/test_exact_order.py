"""Exact commutes stand in an order that comes again; nothing else is moved."""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Script, register
from strategies import queries

from spanflow import Session, commute, generate, seq, system, user
from spanflow.errors import OptimizerError
from spanflow.ir.denotation import denote
from spanflow.ir.fidelity import EXACT, MOVED, Rung
from spanflow.ir.nodes import Commute, Generate, Node
from spanflow.optimizer.order import RecentOrders, canonical_order, order_exact
from spanflow.optimizer.pipeline import optimise

DOCUMENTS = [user(f"document {i}") for i in range(8)]
CANONICAL = sorted(DOCUMENTS, key=lambda node: node.digest)


def ask(documents: Sequence[Node], rung: Rung | None = EXACT, head: str = "s") -> Generate:
    return generate(seq(system(head), commute(*documents, rung=rung), user("Which?")))


def read(root: Node) -> tuple[Node, ...]:
    """The operands of the commute, in the order in which they stand."""
    group = root.query.operands[1]  # type: ignore[attr-defined]
    assert isinstance(group, Commute)
    return group.operands


@given(st.permutations(DOCUMENTS))
def test_any_order_becomes_one(documents: list[Node]) -> None:
    assert read(optimise(ask(documents)).root) == tuple(CANONICAL)


def test_only_exact_commutes_move() -> None:
    backwards = CANONICAL[::-1]
    for rung in (MOVED, None):
        done = optimise(ask(backwards, rung))
        assert read(done.root) == tuple(backwards)
        assert done.steps == ()
    assert read(optimise(ask(backwards, None), rung=EXACT).root) == tuple(CANONICAL)
    assert read(optimise(ask(backwards, MOVED), rung=EXACT).root) == tuple(backwards)


def test_what_is_in_a_span_keeps_its_order() -> None:
    inner = seq(user("a"), commute(*CANONICAL[1::-1], rung="exact"))
    root = generate(seq(commute(inner, user("b"), rung="moved"), user("q")))
    assert optimise(root).steps == ()
    root = generate(seq(commute(inner, user("b"), rung="exact"), user("q")))
    assert {step.rule for step in optimise(root).steps} == {"order"}


def test_an_inner_commute_takes_its_rung_from_the_outer_one() -> None:
    group = commute(user("z"), commute(*CANONICAL[::-1], anchor="none"), rung="exact")
    done = optimise(generate(seq(group, user("q")))).root
    inner = next(node for node in done.query.operands[0].operands if isinstance(node, Commute))  # type: ignore[attr-defined]
    assert inner.operands == tuple(CANONICAL)


def test_candidates_come_behind_what_is_given() -> None:
    candidates = [generate(user(str(i))) for i in range(3)]
    operands = [candidates[0], DOCUMENTS[0], candidates[1], DOCUMENTS[1], candidates[2]]
    order = canonical_order(operands)
    assert {operands[i] for i in order[:2]} == set(DOCUMENTS[:2])


def test_it_is_explained() -> None:
    done = optimise(ask(CANONICAL[::-1]))
    (step,) = done.steps
    assert (step.pass_name, step.rule, step.path) == ("order", "order", "$.query.operands[1]")
    assert step.before == Commute(tuple(CANONICAL[::-1]), EXACT).digest
    assert step.after == Commute(tuple(CANONICAL), EXACT).digest


@given(queries(max_leaves=16), st.sampled_from([None, EXACT, MOVED]))
def test_order_means_nothing(root: Node, rung: Rung | None) -> None:
    ordered, _ = order_exact(root, rung=rung)
    assert denote(ordered) == denote(root)
    assert order_exact(ordered, rung=rung) == (ordered, ())


def test_recent_orders_go_on_where_an_earlier_prompt_began() -> None:
    hint = RecentOrders()
    a, b, c, d = CANONICAL[:4]
    assert read(optimise(ask([d, b]), hint=hint).root) == (b, d)
    # Canonical would be a, b, d: nothing of the first prompt could be used again.
    assert read(optimise(ask([a, b, d]), hint=hint).root) == (b, d, a)
    assert read(optimise(ask([c, d, b]), hint=hint).root) == (b, d, c)
    # The longest beginning counts.
    assert read(optimise(ask([a, b, c, d]), hint=hint).root) in {(b, d, a, c), (b, d, c, a)}
    # Behind another head nothing is shared.
    assert read(optimise(ask([a, b, d], head="other"), hint=hint).root) == (a, b, d)


def test_recent_orders_forget() -> None:
    hint = RecentOrders(capacity=1)
    a, b, c, d = CANONICAL[:4]
    optimise(ask([b, d]), hint=hint)
    optimise(ask([c, d]), hint=hint)
    assert read(optimise(ask([a, b, d]), hint=hint).root) == (a, b, d)


@given(st.integers(0, 2**32))
def test_recent_orders_are_orders(seed: int) -> None:
    random = Random(seed)
    hint = RecentOrders(capacity=4)
    for _ in range(12):
        chosen = random.choices(DOCUMENTS, k=random.randint(2, 6))  # some of them twice
        order = hint.order(chosen, b"")
        assert sorted(order) == list(range(len(chosen)))
        assert hint.order([chosen[i] for i in order], b"") == list(range(len(chosen)))


def test_recent_orders_hit_more_than_canonical_order() -> None:
    """Documents that come up together again and again, with one that changes."""
    shared = {False: 0, True: 0}
    random = Random(7)
    for is_hinted in shared:
        hint = RecentOrders() if is_hinted else None
        seen: list[tuple[Node, ...]] = []
        for _ in range(40):
            chosen = [*DOCUMENTS[:3], random.choice(DOCUMENTS[3:])]
            random.shuffle(chosen)
            now = read(optimise(ask(chosen), hint=hint).root)
            shared[is_hinted] += max((num_shared(now, before) for before in seen), default=0)
            seen.append(now)
    assert shared[True] > shared[False]


def num_shared(one: Sequence[Node], other: Sequence[Node]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def test_a_hint_that_gives_no_order_is_named() -> None:
    class Broken:
        def order(self, operands: Sequence[Node], head: bytes) -> Sequence[int]:
            return [0, 0]

    with pytest.raises(
        OptimizerError,
        match=r"^\$\.query\.operands\[1\]: Broken\.order gave \[0, 0\] for 2 operands; it must give each",
    ):
        optimise(ask(DOCUMENTS[:2]), hint=Broken())


def test_a_session_asks_its_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    asked: list[tuple[list[str], list[str]]] = []
    for hint in (None, RecentOrders()):
        script = Script()
        with Session("m", engine="scripted", script=script, rung="exact", order_hint=hint) as session:
            for documents in (CANONICAL[1:3], CANONICAL[:3]):
                session.run(ask(documents, None))
            explained = session.explain(ask(CANONICAL[:3], None))
        first, second = (re.findall(r"document \d", text) for text in script.texts())
        asked.append((first, second))
        assert re.findall(r"document \d", explained.tree) == second  # an explanation is of what would run
    a, b, c = (node.parts[0].text for node in CANONICAL[:3])  # type: ignore[attr-defined]
    assert asked == [([b, c], [a, b, c]), ([b, c], [b, c, a])]


def test_recent_orders_may_be_asked_by_several_threads() -> None:
    hint = RecentOrders(capacity=8)

    def ask_often(seed: int) -> None:
        random = Random(seed)
        for _ in range(200):
            chosen = random.choices(DOCUMENTS, k=random.randint(1, 6))
            assert sorted(hint.order(chosen, bytes([seed % 3]))) == list(range(len(chosen)))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask_often, range(16)))
