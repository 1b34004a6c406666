"""Wide judges as trees: the candidates and the judge's words are kept, and no call is wider than asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizer.test_lowered import inner

from spanflow import assistant, commute, generate, seq, system, user
from spanflow.errors import QueryError
from spanflow.ir.fidelity import MOVED
from spanflow.ir.nodes import Commute, Generate, Node, Sampling
from spanflow.ir.verify import verify
from spanflow.ir.walk import rebuild
from spanflow.optimizer.candidates import all_candidates
from spanflow.optimizer.passes import DEFAULT, LOCALITY
from spanflow.optimizer.pipeline import optimise
from spanflow.optimizer.rules.judge_tree import why_no_tree
from spanflow.plan.graph import build_plan

#: What tells judges from candidates: their max_tokens.
JUDGE = 777


def candidate(name: int) -> Generate:
    return generate(seq(system("Write."), user(f"Topic {name}")), max_tokens=5 + name)


def wide(number: int, arity: int = 2, **options: object) -> Generate:
    group = commute(*[candidate(i) for i in range(number)], associative=True)
    return generate(
        seq(system("Judge."), group, user("Which is best?")),
        max_tokens=JUDGE,
        temperature=0.5,
        reduce="tree",
        arity=arity,
        **options,  # type: ignore[arg-type]
    )


def tree_of(judge: Generate) -> Generate:
    root = optimise(judge).root
    assert isinstance(root, Generate)
    return root


def is_judge(node: Node) -> bool:
    return isinstance(node, Generate) and node.sampling.max_tokens == JUDGE


def plies(root: Generate) -> list[list[Generate]]:
    """The judges by how far they are from the last one."""
    found: list[list[Generate]] = []
    ply = [root]
    while ply:
        found.append(ply)
        ply = [node for judge in ply for node in inner(judge).values() if is_judge(node)]  # type: ignore[misc]
    return found


def judged(judge: Generate) -> Commute:
    """The commute that a judge reads."""
    query = judge.query
    return next(node for node in getattr(query, "operands", ()) if isinstance(node, Commute))


def leaves(root: Generate) -> Iterator[tuple[int, Node]]:
    """The candidates in reading order, with the number of judges above each."""
    stack: list[tuple[int, Node]] = [(0, root)]
    while stack:
        depth, node = stack.pop()
        if isinstance(node, Generate) and is_judge(node):
            stack += [(depth + 1, operand) for operand in reversed(judged(node).operands)]
        else:
            yield depth, node


def without_candidates(judge: Generate) -> Node:
    """What a judge is told besides its candidates."""
    group = judged(judge)
    emptied = replace(group, operands=(user("candidates"),))
    return rebuild(judge.query, lambda node: emptied if node == group else node)


def test_eight_by_two() -> None:
    root = tree_of(wide(8))
    assert [len(ply) for ply in plies(root)] == [1, 2, 4]
    assert {len(judged(judge).operands) for ply in plies(root) for judge in ply} == {2}
    plan = build_plan(root, rung=MOVED, seed=0)
    assert [len(stage) for stage in plan.stages()] == [8, 4, 2, 1]
    assert all(found.taken_over for found in all_candidates(root))


def test_five_by_two_is_balanced() -> None:
    root = tree_of(wide(5))
    assert [depth for depth, _ in leaves(root)] == [2, 2, 2, 3, 3]
    assert sum(len(ply) for ply in plies(root)) == 4


@given(st.integers(1, 70), st.integers(2, 7))
def test_any_number_by_any_arity(number: int, arity: int) -> None:
    judge = wide(number, arity)
    root = tree_of(judge)
    verify(root)
    found = list(leaves(root))
    assert [node for _, node in found] == [candidate(i) for i in range(number)]
    depths = {depth for depth, _ in found}
    expected = 1
    while arity**expected < number:
        expected += 1
    assert max(depths) == len(plies(root)) == expected
    assert max(depths) - min(depths) <= 1
    calls = [each for ply in plies(root) for each in ply]
    assert all(len(judged(each).operands) <= arity for each in calls)
    assert ceil((number - 1) / (arity - 1)) <= len(calls) <= max(number - 1, 1)
    # The judge's words and options are those of every call.
    assert {without_candidates(each) for each in calls} == {without_candidates(judge)}
    assert {(each.sampling, each.model, each.n, each.reduce) for each in calls} == {(judge.sampling, None, 1, None)}
    assert all(judged(each).associative for each in calls)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(2, 4))
def test_samples_count(samples: list[int], arity: int) -> None:
    group = commute(*[replace(candidate(i), n=n) for i, n in enumerate(samples)], associative=True)
    root = tree_of(replace(wide(1, arity), query=seq(system("Judge."), group)))
    counted: Counter[Node] = Counter()
    for _, node in leaves(root):
        assert isinstance(node, Generate)
        counted[replace(node, n=1)] += node.n
    assert counted == {candidate(i): n for i, n in enumerate(samples)}
    assert all(
        sum(getattr(operand, "n", 1) for operand in judged(judge).operands) <= arity
        for ply in plies(root)
        for judge in ply
    )


def test_samples_of_the_last_judge_are_drawn_once_more_each() -> None:
    root = tree_of(wide(4, n=3))
    assert root.n == 3
    assert {judge.n for judge in plies(root)[1]} == {1}


def test_seeds_of_samples_differ_by_their_places() -> None:
    drawn = replace(candidate(0), n=4, sampling=Sampling(5, 1.0, seed=11))
    root = tree_of(replace(wide(1), query=commute(drawn, associative=True)))
    plan = build_plan(root, rung=MOVED, seed=0)
    assert len({g.seed for g in plan.order if g.node.sampling == drawn.sampling}) == 4


def test_a_judge_in_a_judge() -> None:
    """24 candidates, two levels deep, each level a tree of its own."""
    judges = [replace(wide(24, 3), sampling=Sampling(9 + number)) for number in range(24)]
    top = replace(wide(1, 5), query=seq(system("Top."), commute(*judges, associative=True)))
    root = tree_of(top)
    assert [node for _, node in leaves(root)] == [tree_of(judge) for judge in judges]
    assert [len(ply) for ply in plies(root)] == [1, 5]
    # Of each wide judge: its candidates, and the judges below its last one (3 shares of 8, each of 3 shares).
    below = 24 + 3 + 9
    assert sum(1 for _ in all_candidates(root)) == 24 * (below + 1) + 5


def test_it_is_done_once() -> None:
    root = tree_of(wide(9, 2))
    again = optimise(root)
    assert again.root == root
    assert again.steps == ()


def test_few_candidates_are_one_call() -> None:
    assert tree_of(wide(3, 3)) == optimise(replace(wide(3), reduce=None)).root
    group = commute(candidate(1), associative=True)
    assert inner(tree_of(replace(wide(1), query=seq(system("Judge."), group)))).keys() == {
        "$.query.operands[1].operands[0]"
    }


def test_documents_as_candidates() -> None:
    group = commute(*[user(f"Plan {i}") for i in range(4)], assistant("My plan"), associative=True)
    root = tree_of(replace(wide(1), query=seq(system("Judge."), group)))
    assert [node for _, node in leaves(root)] == list(group.operands)


def test_a_refusal_says_where_and_what_to_do() -> None:
    judge = replace(wide(8), query=seq(system("s"), *[candidate(i) for i in range(8)]))
    with pytest.raises(QueryError) as failure:
        optimise(generate(seq(commute(user("a"), judge), user("q"))))
    assert str(failure.value) == (
        "$.query.operands[0].operands[1]: generate: reduce='tree': its 8 candidates stand in an ordered join, which "
        "may not be judged in parts; join them with commute(..., associative=True) if their order does not matter"
    )
    assert why_no_tree(wide(8)) == ""


def test_the_pass_can_be_left_out() -> None:
    passes = tuple(each for each in DEFAULT if each is not LOCALITY)
    root = optimise(wide(8), passes=passes).root
    assert root == wide(8)


def test_candidates_inside_a_message() -> None:
    """Each smaller judge is sent the message with its share; the next one reads the answers in the same place."""
    group = commute(*[candidate(i) for i in range(4)], associative=True)
    root = tree_of(replace(wide(1), query=user("Judge:", group, "Which is best?")))
    smaller = [node for node in inner(root).values() if is_judge(node)]
    assert list(inner(root)) == ["$.query.parts[1].operands[0]", "$.query.parts[1].operands[1]"]
    assert smaller == [
        replace(root, query=user("Judge:", replace(group, operands=share), "Which is best?"))
        for share in (group.operands[:2], group.operands[2:])
    ]
    verify(root)
