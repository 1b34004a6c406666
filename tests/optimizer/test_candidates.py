"""Which inner generations are taken over as spans: what is said here is what lowering and the plan do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from optimizer.test_lowered import answered, asked
from strategies import queries

from spanflow import assistant, chat, commute, generate, seq, system, user
from spanflow.ir.fidelity import EXACT, MOVED, Rung, repair
from spanflow.ir.nodes import Generate, Node
from spanflow.optimizer.candidates import Candidate, all_candidates, candidates
from spanflow.optimizer.passes import DESUGAR, DISTRIBUTE, ORDER, SIMPLIFY
from spanflow.optimizer.pipeline import optimise
from spanflow.plan.graph import build_plan

RUNGS = st.sampled_from([None, EXACT, MOVED, repair(4)])


def inner(text: str = "u1", **options: object) -> Generate:
    return generate(seq(system("s1"), user(text)), **options)  # type: ignore[arg-type]


def taken(outer: Generate, rung: Rung | None = None) -> list[str]:
    return [found.path for found in candidates(outer, rung=rung) if found.taken_over]


@pytest.mark.parametrize("number", [1, 2, 4, 24])
@pytest.mark.parametrize(
    "around",
    [
        lambda group: seq(system("s2"), group),
        lambda group: seq(system("s2"), group, user("Which?")),
        lambda group: seq(user("Which?"), seq(seq(group)), user("?")),
        lambda group: group,
        lambda group: seq(commute(user("d1"), user("d2")), commute(user("d3"), group)),
        lambda group: commute(seq(user("Candidates:"), group), user("None of them.")),
    ],
    ids=["behind", "before", "nested", "alone", "two commutes", "in an operand"],
)
def test_any_number_in_any_join(number: int, around: object) -> None:
    outer = generate(around(commute(*[inner(str(i)) for i in range(number)])))  # type: ignore[operator]
    assert len(taken(outer)) == number
    done = optimise(outer).root
    assert isinstance(done, Generate)
    assert len(taken(done)) == number
    assert sum(source.kind == "generated" for source in answered(done).sources) == number


def test_two_levels() -> None:
    judges = [
        generate(seq(system("s2"), commute(*[inner(f"{i}{j}") for j in range(24)]), user("Best?"))) for i in range(24)
    ]
    done = optimise(generate(seq(system("s3"), commute(*judges), user("Best?")))).root
    found = list(all_candidates(done))
    assert len(found) == 24 + 24 * 24
    assert all(candidate.taken_over for candidate in found)
    assert found[0].path == "$.query.operands[1].operands[0]"
    assert found[-1].path == "$.query.operands[1].operands[23].query.operands[1].operands[23]"


def test_samples_stay_a_group() -> None:
    outer = optimise(generate(seq(system("s"), commute(inner(n=24)), user("Best?")))).root
    assert isinstance(outer, Generate)
    assert candidates(outer) == (
        Candidate(
            "$.query.operands[1].operands[0]",
            inner(n=24),
            "$.query.operands[1]",
            24,
            True,
            MOVED,
            "an operand of a commute, moved",
        ),
    )


def test_equal_generates_are_two_samples() -> None:
    outer = generate(seq(commute(inner(), inner()), user("Best?")))
    assert taken(optimise(outer).root) == ["$.query.operands[0].operands[0]", "$.query.operands[0].operands[1]"]  # type: ignore[arg-type]


REASONS = [
    (generate(seq(inner(), user("u"))), None, "it stands in order with what is around it, which it has to see"),
    (generate(commute(inner(), rung="exact")), None, "its commute is exact"),
    (generate(commute(inner())), EXACT, "the session is exact, and its commute asks for nothing else"),
    (generate(commute(inner(), rung="exact")), EXACT, "the session is exact, and its commute asks for nothing else"),
    (
        generate(commute(inner(model="judge"))),
        None,
        "it comes from model 'judge', and the prompt is for the session's model: their KV differs",
    ),
    (generate(commute(user("a"), commute(inner(), rung="exact"), rung="moved")), EXACT, "its commute is exact"),
    (generate(commute(seq(user("a"), chat([user("b")])), rung="exact")), MOVED, "its commute is exact"),
]


@pytest.mark.parametrize(
    ("outer", "rung", "reason"), REASONS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_why_not(outer: Generate, rung: Rung | None, reason: str) -> None:
    (found,) = candidates(outer, rung=rung)
    assert (found.taken_over, found.rung, found.reason) == (False, EXACT, reason)


def test_a_nested_commute_has_its_own_rung() -> None:
    outer = generate(commute(user("a"), commute(inner("1"), rung="moved"), inner("2"), rung="exact"))
    assert [(c.path, c.taken_over, str(c.rung)) for c in candidates(outer)] == [
        ("$.query.operands[1].operands[0]", True, "moved"),
        ("$.query.operands[2]", False, "exact"),
    ]
    repaired = generate(commute(inner("1"), commute(inner("2")), rung="repair(8)"))
    assert [str(c.rung) for c in candidates(repaired)] == ["repair(8)", "repair(8)"]
    assert {c.commute_path for c in candidates(repaired)} == {"$.query"}


@pytest.mark.parametrize(("rung", "told"), [(None, "moved"), (repair(16), "repair(16)"), (MOVED, "moved")])
def test_a_rung_of_the_session_holds_for_answers_too(rung: Rung | None, told: str) -> None:
    outer = generate(seq(commute(inner()), user("u")))
    assert [str(found.rung) for found in candidates(outer, rung=rung)] == [told]
    (done,) = [each for each in optimise(outer, rung=rung).trace if each.name == "distribute"]
    assert done.notes()[0].endswith(f"taken over as a span: an operand of a commute, {told}")


def test_what_is_inside_an_inner_generation_is_its_own() -> None:
    outer = generate(commute(generate(seq(commute(inner()), user("b")))), n=2)
    assert [c.path for c in candidates(outer)] == ["$.query.operands[0]"]
    assert [c.path for c in all_candidates(outer)] == [
        "$.query.operands[0]",
        "$.query.operands[0].query.operands[0].operands[0]",
    ]
    assert list(all_candidates(seq(user("a"), assistant("b")))) == []


def test_the_pass_says_it() -> None:
    outer = generate(seq(inner(), commute(inner()), user("u")))
    (done,) = [each for each in optimise(outer).trace if each.name == "distribute"]
    assert done.notes() == (
        "$.query.operands[0]: read as its tokens, in full attention: it stands in order with what is around it, which "
        "it has to see",
        "$.query.operands[1].operands[0]: taken over as a span: an operand of a commute, moved",
    )
    (done,) = [each for each in optimise(outer, rung=EXACT).trace if each.name == "distribute"]
    assert done.notes()[1] == (
        "$.query.operands[1].operands[0]: read as its tokens, in full attention: the session is exact, and its commute "
        "asks for nothing else"
    )


@given(queries(max_leaves=16, retrieve=False), RUNGS)
def test_lowering_does_what_is_said(root: Node, rung: Rung | None) -> None:
    outer = asked(root)
    spans = [source.rung for source in answered(outer, rung).sources if source.kind == "generated"]
    found = candidates(outer, rung=rung)
    assert spans == [one.rung for one in found if one.taken_over for _ in range(one.num_samples)]


@given(queries(max_leaves=16, retrieve=False), RUNGS)
def test_the_plan_leases_what_is_said(root: Node, rung: Rung | None) -> None:
    outer = optimise(asked(root), passes=(DESUGAR, SIMPLIFY, DISTRIBUTE, ORDER)).root
    assert isinstance(outer, Generate)
    plan = build_plan(outer, rung=rung, seed=0)
    leased = {generation.path for generation in plan.order if generation.is_leased}
    assert leased == {found.path for found in all_candidates(outer, rung=rung) if found.taken_over}
