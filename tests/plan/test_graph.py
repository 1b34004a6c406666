"""Plans: what runs, what waits for what, whose KV is kept, and which seeds are drawn with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import SpeakingTokenizer
from strategies import queries

from spanflow import QueryError, chat, commute, fragment, generate, repair, seq, system, user
from spanflow.compile import as_generate, compile_query
from spanflow.ir.fidelity import EXACT, MOVED
from spanflow.ir.nodes import Generate, Node
from spanflow.ir.walk import preorder, rebuild
from spanflow.lowering.lower import Generated, lower
from spanflow.lowering.prompt import SpanPrompt
from spanflow.lowering.template import ChatTemplate
from spanflow.plan.graph import Candidate, Plan, build_plan
from spanflow.runner import RunOptions

RUNG = repair(32)


def plan_of(query: Node, rung: Any = RUNG, seed: int = 0) -> Plan:
    assert isinstance(query, Generate)
    return build_plan(query, rung=rung, seed=seed)


def candidate(text: str, **options: Any) -> Generate:
    return generate(user(text), **options)


def test_one_generation_waits_for_nothing() -> None:
    plan = plan_of(candidate("hello"))
    (only,) = plan.order
    assert (only.key, only.seed, only.consumers, only.is_leased, only.candidate) == (("$", 0), None, (), False, None)
    assert plan.stages() == ((only,),)
    assert plan.num_inner(only.key) == 0


def test_inner_generations_run_first_in_reading_order() -> None:
    plan = plan_of(generate(seq(system("judge"), commute(candidate("a"), candidate("b")), candidate("c"))))
    paths = ["$.query.operands[1].operands[0]", "$.query.operands[1].operands[1]", "$.query.operands[2]", "$"]
    assert [generation.path for generation in plan.order] == paths
    assert plan.inner == {"$": tuple(paths[:3]), paths[0]: (), paths[1]: (), paths[2]: ()}
    assert [generation.consumers for generation in plan.order] == [(("$", 0),)] * 3 + [()]


def test_nesting_two_levels_deep_makes_three_stages() -> None:
    middle = generate(commute(candidate("a"), candidate("b")))
    plan = plan_of(generate(commute(middle, candidate("c"))))
    by_stage = [[generation.path for generation in stage] for stage in plan.stages()]
    leaves = ["$.query.operands[0].query.operands[0]", "$.query.operands[0].query.operands[1]"]
    assert by_stage == [[*leaves, "$.query.operands[1]"], ["$.query.operands[0]"], ["$"]]
    assert plan.inner["$"] == ("$.query.operands[0]", "$.query.operands[1]")


def test_equal_generates_at_two_places_are_two_samples() -> None:
    one = candidate("a", temperature=1.0)
    plan = plan_of(generate(commute(one, one)))
    first, second = plan.order[:2]
    assert first.node == second.node
    assert first.key != second.key
    assert first.seed != second.seed


def test_n_samples_are_n_generations_of_one_prompt_and_each_reads_all_inner_answers() -> None:
    inner = candidate("a", n=3, temperature=1.0)
    plan = plan_of(generate(seq(commute(inner), user("which?")), n=2, temperature=1.0))
    samples = plan.samples("$.query.operands[0].operands[0]")
    assert [sample.index for sample in samples] == [0, 1, 2]
    assert all(sample.consumers == (("$", 0), ("$", 1)) for sample in samples)
    assert len({generation.seed for generation in plan.order}) == 5
    assert plan.num_inner(("$", 1)) == 3


def test_seeds_are_the_same_again_and_derive_from_the_generate_s_seed_or_the_session_s() -> None:
    def seeds(session: int, **options: Any) -> list[int | None]:
        return [g.seed for g in plan_of(candidate("a", n=3, **options), seed=session).order]

    assert seeds(7, temperature=1.0) == seeds(7, temperature=1.0)
    assert not set(seeds(7, temperature=1.0)) & set(seeds(8, temperature=1.0))
    assert seeds(7, temperature=1.0, seed=1) == seeds(8, temperature=1.0, seed=1)
    assert seeds(7) == [None] * 3
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds(7, temperature=0.5))


@pytest.mark.parametrize(
    ("query", "rung", "leased"),
    [
        (generate(commute(candidate("a"))), RUNG, [True]),
        (generate(commute(candidate("a"), rung="exact")), RUNG, [False]),
        (generate(commute(candidate("a"))), EXACT, [False]),
        (generate(commute(candidate("a"), rung="moved")), EXACT, [True]),
        (generate(seq(candidate("a"), user("and?"))), RUNG, [False]),
        (generate(commute(seq(user("one:"), candidate("a")), user("two"))), RUNG, [True]),
        (generate(commute(seq(user("one:"), commute(candidate("a"), rung="exact")), user("two"))), RUNG, [True]),
        (generate(commute(seq(commute(candidate("a"), rung="moved")), rung="exact")), RUNG, [True]),
        (generate(commute(commute(candidate("a")), candidate("b"), rung="exact")), RUNG, [False, False]),
        (generate(commute(commute(candidate("a"), rung="moved"), candidate("b"), rung="exact")), RUNG, [True, False]),
    ],
)
def test_an_answer_is_leased_where_it_becomes_a_span(query: Generate, rung: Any, leased: list[bool]) -> None:
    assert [generation.is_leased for generation in plan_of(query, rung).order[:-1]] == leased


def test_a_candidate_knows_its_operand_and_how_many_there_are() -> None:
    inner = commute(candidate("b", n=2, temperature=1.0), user("text"))
    plan = plan_of(generate(commute(seq(user("first:"), candidate("a")), inner)))
    group = "$.query"
    assert [generation.candidate for generation in plan.order[:3]] == [
        Candidate("$.query.operands[0]", group, 4),
        Candidate("$.query.operands[1].operands[0]", group, 4),
        Candidate("$.query.operands[1].operands[0]", group, 4),
    ]


def test_a_plan_is_frozen() -> None:
    plan = plan_of(candidate("a"))
    with pytest.raises(nx.NetworkXError, match="Frozen"):
        plan.graph.add_node("b")
    with pytest.raises(AttributeError):
        plan.order[0].seed = 4  # type: ignore[misc]


def test_a_chat_has_to_be_rewritten_first() -> None:
    with pytest.raises(QueryError, match=r"^\$\.query\.operands\[0\]: a chat is not planned as it is"):
        plan_of(generate(commute(chat([("user", "hello")]))))


def test_a_deep_tree_is_planned() -> None:
    query: Node = candidate("a")
    for _ in range(2000):
        query = seq(query, "more")
    assert len(plan_of(generate(query)).order) == 2


def _without_trees(node: Node) -> Node:
    return replace(node, reduce=None) if isinstance(node, Generate) else node


@given(queries(retrieve=False), st.sampled_from([None, EXACT, MOVED, RUNG]))
def test_every_generate_of_any_tree_runs_once_a_sample_and_inner_before_outer(query: Node, rung: Any) -> None:
    try:
        # Whether judges can be trees is the optimizer's matter.
        root = as_generate(rebuild(query, _without_trees))
    except QueryError:  # nothing to read in it
        return
    compiled = compile_query(root, RunOptions(rung=rung), model="m", adapters=["other/model"])
    plan = compiled.plan
    wanted = {
        (path, index) for path, node in preorder(compiled.tree) if isinstance(node, Generate) for index in range(node.n)
    }
    assert {generation.key for generation in plan.order} == wanted
    position = {generation.key: number for number, generation in enumerate(plan.order)}
    for generation in plan.order:
        for consumer in generation.consumers:
            assert generation.path.startswith(f"{consumer[0]}.query")
            assert position[generation.key] < position[consumer]
    assert sum(map(len, plan.stages())) == len(plan.order)


def test_texts_and_fragments_alone_plan_one_generation() -> None:
    assert len(plan_of(generate(user(commute(fragment("a"), fragment("b")), "why?"))).order) == 1


@given(queries(retrieve=False, max_leaves=8), st.sampled_from([None, EXACT, MOVED, RUNG]))
def test_what_lowering_takes_over_as_a_span_is_leased(query: Node, rung: Any) -> None:
    template = ChatTemplate(SpeakingTokenizer())
    try:
        compiled = compile_query(as_generate(query), RunOptions(rung=rung), model="m", adapters=["other/model"])
    except QueryError:  # nothing to read in it
        return
    plan = compiled.plan
    for path, inner in plan.inner.items():
        node = plan.samples(path)[0].node
        names = {10_000 + number: name for number, name in enumerate(inner)}
        generated = {}
        for number, name in names.items():
            first, *others = plan.samples(name)
            said = Generated(SpanPrompt((number, 5, 6)), (7, 8), "so it is", first.node.model == node.model)
            generated[name] = (said,) * (1 + len(others))
        try:
            lowered = lower(node.query, template, generated=generated, rung=rung, anchor="header", path=f"{path}.query")
        except QueryError:  # a surrogate, a control token, no text
            continue
        taken = {names[span.anchor.token_ids[0]] for span in lowered.prompt.spans if span.is_generated}
        assert all(sample.is_leased for name in taken for sample in plan.samples(name))
