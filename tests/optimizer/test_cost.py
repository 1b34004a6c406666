"""The passes cost little, and their cost grows with the query and no faster."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from spanflow import chat, commute, generate, seq, system, user
from spanflow.ir.nodes import Commute, Message, Node, Seq
from spanflow.optimizer.driver import rewrite
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
    """Far above what it takes on an idle machine (about 0.05 s), and far below what anything quadratic would take."""
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
