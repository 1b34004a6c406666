"""The passes cost little, and their cost grows with the query and no faster."""

from __future__ import annotations

import cProfile
import time
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spanflow import chat, commute, generate, seq, system, user
from spanflow.ir.fidelity import EXACT, MOVED
from spanflow.ir.nodes import Chat, Commute, Generate, Message, Node, Seq, Text
from spanflow.optimizer.driver import rewrite
from spanflow.optimizer.lint import lint
from spanflow.optimizer.passes import SIMPLIFY
from spanflow.optimizer.pipeline import optimise


def judge(number: int) -> Node:
    candidates = [generate(seq(system("Write."), user(f"Topic {i}"))) for i in range(number)]
    return generate(seq(system("Judge."), commute(candidates), user("Which is best?")))


def nested(number: int) -> Node:
    groups = [seq("", commute(commute(user(f"a {i}"), user(f"b {i}")), "")) for i in range(number)]
    return generate(seq(system("Answer."), commute(groups), user("Which?")))


def deep(number: int) -> Node:
    root: Node = user("bottom")
    for level in range(number):
        root = seq(user(f"{level}"), root) if level % 2 else commute(user(f"{level}"), root)
    return generate(root)


@pytest.mark.parametrize("shape", [judge, nested, deep])
def test_rules_are_asked_in_proportion_to_the_size(shape: Callable[[int], Node]) -> None:
    num_asked = 0

    def count(node: Seq | Commute | Message) -> Node | None:
        nonlocal num_asked
        num_asked += 1
        return None

    asked = []
    for number in (100, 1_000):
        num_asked = 0
        rewrite(shape(number), (count, *SIMPLIFY.rules))
        asked.append(num_asked)
    assert asked[1] <= 10.5 * asked[0]


@pytest.mark.parametrize("root", [judge(1_666), nested(1_111), deep(3_333)], ids=["judge", "nested", "deep"])
def test_ten_thousand_nodes(root: Node) -> None:
    """Far above what it takes on an idle machine (about 0.04 s), and far below what anything quadratic would take."""
    least = 10.0
    for _ in range(3):
        begun = time.process_time()
        optimise(root)
        least = min(least, time.process_time() - begun)
    assert least < 0.6


def test_a_judge_over_chats_of_ten_thousand_nodes() -> None:
    chats = [chat([("system", "Write."), ("user", f"Topic {i}")]) for i in range(2_000)]
    done = optimise(generate(seq(commute(chats), user("Which is best?"))))
    assert len(done.steps) == 2_000


A, T, NOTHING = user("a"), Text("t"), Text("")
Level = Callable[[Node], Node]
#: What a nest may be made of: levels around messages, and levels in a message.
OUTSIDE: tuple[Level, ...] = (
    lambda e: Seq((e,)),
    lambda e: Seq((A, e)),
    lambda e: Seq((e, NOTHING)),
    lambda e: Commute((e,)),
    lambda e: Commute((A, e)),
    lambda e: Commute((e, NOTHING)),
    lambda e: Commute((e, A), separator="-"),
    lambda e: Commute((e,), anchor="none"),
    lambda e: Commute((e, A), MOVED),
    lambda e: Commute((A, e), EXACT),
    lambda e: Commute((e,), associative=True),
    lambda e: Commute((Seq((e, NOTHING)), A)),
    lambda e: Commute((T, e)),
    lambda e: Generate(e),
    lambda e: Generate(Seq((e, A))),
    lambda e: Generate(Commute((T, e))),
    lambda e: Chat((e, A)),
)
INSIDE: tuple[Level, ...] = (
    lambda e: Seq((e,)),
    lambda e: Seq((T, e)),
    lambda e: Seq((e, NOTHING)),
    lambda e: Commute((e,)),
    lambda e: Commute((T, e)),
    lambda e: Commute((e, T), separator="-"),
    lambda e: Commute((e,), anchor="none"),
    lambda e: Commute((e, T), MOVED),
    lambda e: Commute((T, e), EXACT),
    lambda e: Commute((e,), associative=True),
    lambda e: Commute((e, Generate(T))),
)


def nest(levels: list[Level], number: int, *, in_message: bool) -> Node:
    root: Node = T if in_message else A
    for level in range(number):
        root = levels[level % len(levels)](root)
    return Generate(Seq((system("s"), Message("user", (root,)) if in_message else root, A)))


def num_calls(call: Callable[[], object]) -> int:
    """How many functions are called: what takes time, and the same on every machine."""
    profile = cProfile.Profile()
    profile.runcall(call)
    return sum(entry.callcount for entry in profile.getstats())


def check_growth(levels: list[Level], *, in_message: bool) -> None:
    small, large = (nest(levels, number, in_message=in_message) for number in (100, 400))
    for work in (optimise, lambda root: optimise(root, rung=EXACT), lint):
        assert num_calls(lambda work=work: work(large)) < 5 * num_calls(lambda work=work: work(small))  # type: ignore[misc]


@settings(max_examples=25)
@given(st.lists(st.sampled_from(OUTSIDE), min_size=1, max_size=3))
@example([OUTSIDE[0], lambda e: Commute((e, A))])
@example([OUTSIDE[11], OUTSIDE[9]])
def test_nests_around_messages_cost_in_proportion_to_their_depth(levels: list[Level]) -> None:
    check_growth(levels, in_message=False)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(INSIDE), min_size=1, max_size=3))
@example([INSIDE[9], INSIDE[5], INSIDE[6]])
def test_nests_in_messages_cost_in_proportion_to_their_depth(levels: list[Level]) -> None:
    check_growth(levels, in_message=True)


def test_orders_of_nested_exact_commutes_cost_in_proportion_to_their_depth() -> None:
    """Whether something is generated in an operand is not searched for anew at each level."""
    check_growth([lambda e: Seq((A, Commute((e, A, user("b")), EXACT)))], in_message=False)
