"""What the model reads is the same before and after the passes, and answers that were spans stay spans."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from lowering.families import FAMILIES, tiny
from lowering.trees import bot, gen, plus, seq, sys_, user
from strategies import queries

from spanflow.ir.fidelity import EXACT, MOVED, Rung, repair
from spanflow.ir.nodes import Chat, Commute, Generate, Message, Node, Seq, Text
from spanflow.ir.walk import child_path, children
from spanflow.lowering.lower import Generated, Lowered, lower
from spanflow.lowering.prompt import SpanPrompt, span_key
from spanflow.lowering.template import ChatTemplate
from spanflow.optimizer.candidates import all_candidates
from spanflow.optimizer.passes import DESUGAR, DISTRIBUTE, SIMPLIFY
from spanflow.optimizer.pipeline import optimise
from spanflow.plan.graph import build_plan

PASSES = (DESUGAR, SIMPLIFY, DISTRIBUTE)


@cache
def template() -> ChatTemplate:
    return ChatTemplate(tiny(FAMILIES["chatml"]))


def inner(root: Generate) -> dict[str, Node]:
    """The generations that a prompt reads, in reading order."""
    found: dict[str, Node] = {}
    stack: list[tuple[str, Node]] = [("$.query", root.query)]
    while stack:
        path, node = stack.pop()
        if isinstance(node, Generate | Chat):
            found[path] = node
        else:
            stack += [(child_path(node, path, i), child) for i, child in enumerate(children(node))][::-1]
    return found


def answered(root: Generate, rung: Rung | None = MOVED) -> Lowered:
    """Lowered, with an answer of its own for each sample of each inner generation, numbered in reading order. Those of
    other models are not leased."""
    generated: dict[str, tuple[Generated, ...]] = {}
    number = 500
    for path, node in inner(root).items():
        answers = []
        is_leased = getattr(node, "model", None) == root.model
        for _ in range(getattr(node, "n", 1)):
            number += 1
            answers.append(Generated(SpanPrompt((1, number)), (number, number + 7), "said", is_leased))
        generated[path] = tuple(answers)
    return lower(root.query, template(), generated=generated, rung=rung, anchor="header")


def asked(root: Node) -> Generate:
    if isinstance(root, Generate) and root.n > 1:
        root = Commute((root,))
    return Generate(Seq((root, Message("user", (Text("and now?"),)))))


def said(lowered: Lowered) -> str:
    """The text of a prompt; where spans are cut otherwise, its tokens may be others."""
    texts = template()._tokenizer._texts
    return "".join(texts.get(token, f"<{token}>") for token in lowered.prompt.token_ids)


def keys(lowered: Lowered) -> list[Any]:
    return [(span_key(lowered.prompt, span), span.repair) for span in lowered.prompt.spans]


@given(queries(max_leaves=16, retrieve=False), st.sampled_from([EXACT, MOVED, repair(4)]))
def test_the_model_reads_the_same(root: Node, rung: Rung | None) -> None:
    root = asked(root)
    done = optimise(root, passes=PASSES).root
    assert isinstance(done, Generate)
    assert said(answered(done, rung)) == said(answered(root, rung))


@given(queries(max_leaves=16, retrieve=False), st.sampled_from([EXACT, MOVED, repair(4)]))
def test_an_answer_that_is_taken_over_stays_so(root: Node, rung: Rung | None) -> None:
    root = asked(root)
    done = optimise(root, passes=PASSES).root
    assert isinstance(done, Generate)
    before, after = (
        [key for key, source in zip(keys(lowered), lowered.sources, strict=True) if source.kind == "generated"]
        for lowered in (answered(root, rung), answered(done, rung))
    )
    assert after == before


TEXTS = st.sampled_from(["a", "b", "two words", "\n", "<|im_start|>"])


@st.composite
def judges(draw: st.DrawFn) -> Generate:
    """Judges over two candidates or more, written in all the ways that joins may nest."""
    single = st.one_of(
        TEXTS.map(user),
        st.integers(1, 3).map(lambda n: gen(seq(sys_("s"), user("q")), n)),
        TEXTS.map(lambda text: seq(user(text), bot("no"))),
        TEXTS.map(lambda text: seq(user(text), gen())),
    )
    nested = st.recursive(
        single,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=3).map(lambda nodes: plus(*nodes)),
            # Wrapped in a seq, a candidate with samples would be several answers where one is read.
            inner.map(lambda node: node if isinstance(node, Generate | Commute) else seq(node)),
        ),
        max_leaves=6,
    )
    candidates = draw(st.lists(nested, min_size=2, max_size=4))
    noise = draw(st.lists(st.sampled_from(["", seq(), seq("")]), max_size=2))
    rung = draw(st.sampled_from([None, MOVED, EXACT, repair(2)]))
    query: Node = seq(sys_("Judge."), seq(*noise, plus(*candidates, *noise, rung=rung)), user("Which?"))
    for _ in range(draw(st.integers(0, 2))):
        query = seq(query)
    return Generate(query)


@given(judges(), st.sampled_from([EXACT, MOVED, repair(4)]))
def test_spans_outside_equal_spans_inside(root: Generate, rung: Rung | None) -> None:
    """What a judge reads as spans does not depend on how its joins are nested."""
    done = optimise(root, passes=PASSES).root
    assert isinstance(done, Generate)
    before, after = answered(root, rung), answered(done, rung)
    assert after.prompt == before.prompt
    assert keys(after) == keys(before)
    assert [source.kind for source in after.sources] == [source.kind for source in before.sources]


def test_candidates_inside_a_message_are_spans_of_it() -> None:
    """The way for templates whose roles alternate: no turn of their own, and nothing of their prompts is taken."""
    root = Generate(user("Judge:", plus(Generate(Text("one")), gen(n=2)), "Which?"))
    done = optimise(root, passes=PASSES).root
    assert isinstance(done, Generate)
    assert list(inner(done)) == ["$.query.parts[1].operands[0]", "$.query.parts[1].operands[1]"]
    lowered = answered(done)
    assert [
        (source.kind, span.num_taken) for source, span in zip(lowered.sources, lowered.prompt.spans, strict=True)
    ] == [("generated", 0)] * 3
    assert said(lowered).count("<|im_start|>") == 2
    assert all(candidate.taken_over for candidate in all_candidates(done))
    plan = build_plan(done, rung=MOVED, seed=0)
    assert [(len(stage), {generation.is_leased for generation in stage}) for stage in plan.stages()] == [
        (3, {True}),
        (1, {False}),
    ]
