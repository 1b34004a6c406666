"""Whole trees of judges, at random: what an outer prompt takes over is what was run inside, at every level."""

from __future__ import annotations

from itertools import count
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from lowering.trees import bot, gen, plus, seq, sys_, user
from optimizer.test_lowered import template
from scripted_engine import SpeakingTokenizer

from spanflow import Session, commute, from_json, generate, system
from spanflow import seq as join
from spanflow import user as ask
from spanflow.ir.fidelity import EXACT, MOVED, Rung, repair
from spanflow.ir.nodes import Generate, Node
from spanflow.lowering.lower import Generated, Lowered, lower
from spanflow.lowering.prompt import Span
from spanflow.optimizer.candidates import candidates
from spanflow.optimizer.pipeline import optimise
from spanflow.plan.graph import build_plan

TEXTS = st.sampled_from(["a", "two words", "\n", "<|im_start|>user"])
RUNGS = st.sampled_from([None, EXACT, MOVED, repair(3)])


def judge_of(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
    """Judges over candidates of one kind, in the places where candidates may stand."""

    @st.composite
    def judges(draw: st.DrawFn) -> Node:
        one = st.one_of(
            inner,
            inner,
            TEXTS.map(user),
            # Wrapped in a seq, a candidate with samples would be several answers where one is read.
            st.builds(lambda text, node: seq(user(text), plus(node)), TEXTS, inner),
            st.builds(plus, inner, inner),
        )
        options: dict[str, Any] = draw(st.sampled_from([{}, {"rung": MOVED}, {"rung": EXACT}, {"rung": repair(2)}]))
        drawn = draw(st.lists(one, min_size=1, max_size=4))
        samples = draw(st.integers(1, 3))
        tree: dict[str, Any] = {}
        if draw(st.booleans()):
            options["associative"] = True
            tree = {"reduce": "tree", "arity": draw(st.integers(2, 3))}
        group = plus(*drawn, **options)
        shapes = [
            seq(sys_("Judge."), group, user("Which?")),
            seq(seq(sys_("Judge."), seq(group)), seq()),
            seq(user("Which?"), bot("no"), group, user("And now?")),
            group,
        ]
        return Generate(draw(st.sampled_from(shapes)), n=samples, **tree)

    return judges()


LEAVES = st.builds(lambda text, n: gen(seq(sys_("Write."), user(text)), n), TEXTS, st.integers(1, 3))
JUDGES = st.one_of(judge_of(LEAVES), judge_of(judge_of(LEAVES)), judge_of(judge_of(LEAVES) | LEAVES))


def answered(root: Generate, rung: Rung | None) -> tuple[dict[str, Lowered], dict[str, tuple[Generated, ...]]]:
    """Each prompt of a query and its answers, in the order of its plan, as a runner gets them.

    No two answers share a token, but for the end of the turn, which some of them have.
    """
    plan = build_plan(root, rung=rung, seed=0)
    numbers = count(100_000, 10)
    end = template().end_of_turn_id
    prompts: dict[str, Lowered] = {}
    answers: dict[str, tuple[Generated, ...]] = {}
    for generation in plan.order:
        path = generation.path
        if path in prompts:
            continue  # its other samples answer the same prompt
        inner = {name: answers[name] for name in plan.inner[path]}
        prompts[path] = lower(
            generation.node.query, template(), generated=inner, rung=rung, anchor="header", path=f"{path}.query"
        )
        said = []
        for number in [next(numbers) for _ in range(generation.node.n)]:
            ids = tuple(range(number, number + 1 + number % 4))
            said.append(Generated(prompts[path].prompt, (*ids, end) if number % 3 else ids, "said"))  # type: ignore[arg-type]
        answers[path] = tuple(said)
    return prompts, answers


def taken(lowered: Lowered) -> list[Span]:
    """The answers among the spans of a prompt."""
    return [span for span in lowered.prompt.spans if span.is_generated]


@given(JUDGES, RUNGS)
def test_spans_outside_equal_what_was_run_inside(judge: Generate, rung: Rung | None) -> None:
    root = optimise(judge, rung=rung).root
    assert isinstance(root, Generate)
    prompts, answers = answered(root, rung)
    asked = {generation.path: generation.node for generation in build_plan(root, rung=rung, seed=0).order}
    for path, lowered in prompts.items():
        inner = candidates(asked[path], path, rung=rung)
        inside = [said for found in inner if found.taken_over for said in answers[found.path]]
        for span, said in zip(taken(lowered), inside, strict=True):
            # The anchor is the inner prompt up to the header of its answer, with the spans that it was assembled of.
            assert span.anchor.token_ids + lowered.prompt.tokens(span) == said.prompt.token_ids + said.token_ids
            assert len(span.anchor) + (span.num_taken or 0) == len(said.prompt)
            assert span.anchor.spans == said.prompt.spans
        for found in inner:
            if not found.taken_over:
                ids = lowered.prompt.token_ids
                for said in answers[found.path]:
                    first = ids.index(said.token_ids[0])
                    assert ids[first : first + len(said.token_ids)] == said.token_ids


@given(JUDGES, RUNGS)
def test_again_changes_nothing(judge: Generate, rung: Rung | None) -> None:
    """By all passes together, the trees of judges and the orders of exact commutes included."""
    once = optimise(judge, rung=rung).root
    again = optimise(once, rung=rung)
    assert again.root == once
    assert again.steps == ()


def test_samples_share_what_their_prompt_reads() -> None:
    """What stands in a prompt of n samples is asked once; what stands in each of two prompts, in each of them."""
    write = {"g": {"model": "m", "input": {"user": "Write."}}}
    judge = {"model": "m", "input": {"plus": [write, {"user": "Or this."}]}}
    repeated = optimise(generate(commute(from_json({"repeat": {"n": 3, "g": judge}})), model="m")).root
    twice = optimise(generate(commute(from_json({"plus": [{"g": judge}, {"g": judge}]})), model="m")).root
    for root, number in ((repeated, 1), (twice, 2)):
        assert isinstance(root, Generate)
        plan = build_plan(root, rung=MOVED, seed=0)
        written = [generation for generation in plan.order if not plan.inner[generation.path]]
        assert len(written) == number
        assert len(plan.order) == 1 + (3 if number == 1 else 2) + number
        assert all(generation.is_leased for generation in plan.order[:-1])
    assert isinstance(repeated, Generate)
    (inner,) = build_plan(repeated, rung=MOVED, seed=0).inner["$"]
    first = build_plan(repeated, rung=MOVED, seed=0).order[0]
    assert first.consumers == ((inner, 0), (inner, 1), (inner, 2))


def test_four_candidates_of_eighty_words_come_from_the_cache() -> None:
    """Of each candidate only the last token is computed, which no pass of the model has seen."""
    candidates = [generate(join(system("Write."), ask(f"Topic {i}")), max_tokens=80) for i in range(4)]
    query = generate(join(system("Judge."), commute(candidates), ask("Which is best?")), max_tokens=4)
    options = {"tokenizer": SpeakingTokenizer(), "script": lambda request: "words " * 80, "block_size": 16}
    with Session("m", engine="simulator", rung="moved", **options) as session:  # type: ignore[arg-type]
        result = session.run(query)
    sizes = [span.end - span.start for span in result.spans]
    assert len(sizes) == 4
    assert all(size > 80 for size in sizes)
    assert [(span.status, span.kind) for span in result.spans] == [("hit", "generated")] * 4
    assert [span.moved for span in result.spans] == [size - 1 for size in sizes]
