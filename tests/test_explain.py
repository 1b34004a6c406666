"""Explanations: what is known before anything runs, as data and as text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowering.families import FAMILIES, tiny
from scripted_engine import Script, SpeakingTokenizer, register

from spanflow import EngineDied, QueryError, Session, commute, fragment, generate, seq, system, user
from spanflow.compile import as_generate, compile_query
from spanflow.engine.protocol import Prediction
from spanflow.explain import Expected, Explanation, _explain_passes, explain, lower_known
from spanflow.ir.draw import tree_svg
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt
from spanflow.lowering.template import ChatTemplate
from spanflow.plan.cost import Cost, bound
from spanflow.runner import RunOptions

TEMPLATE = ChatTemplate(SpeakingTokenizer())


def explained(query: Any, window: int | None = 500, **options: Any) -> Explanation:
    chosen = RunOptions().changed(options)
    compiled = compile_query(as_generate(query), chosen, model="m")
    return explain(compiled, lower_known(compiled.plan, TEMPLATE, chosen), chosen, window=window)


RAG = generate(
    seq(
        system("Answer from the documents."),
        user(commute(fragment("The sky is blue.", id="sky"), fragment("The sea is deep.", id="sea")), "What is blue?"),
    ),
    max_tokens=8,
)


def test_the_text_of_a_retrieval() -> None:
    assert str(explained(RAG, rung="repair(2)")) == (
        "G max_tokens=8\n"
        "└─ ✶\n"
        "   ├─ S\n"
        '   │  └─ "Answer from the documents."\n'
        "   └─ U\n"
        "      ├─ +\n"
        '      │  ├─ F sky "The sky is blue."\n'
        '      │  └─ F sea "The sea is deep."\n'
        '      └─ "What is blue?"\n'
        "\n"
        "stage 0  $: at most 8 tokens\n"
        "  prompt: 34 tokens of 500\n"
        "  span [13, 19) 6 tokens, repair(2), behind the header of 3 tokens, text: "
        "$.query.operands[1].parts[0].operands[0]\n"
        "  span [19, 25) 6 tokens, repair(2), behind the header of 3 tokens, text: "
        "$.query.operands[1].parts[0].operands[1]\n"
        "  all spans there: 8 moved, 26 computed (4 of them repaired)\n"
        "  all spans new: 8 moved, 26 computed (4 of them repaired), 18 beside it\n"
        "\n"
        "Costs are bounds: no engine was asked which spans are there, and prefix hits, which save more, do not count."
    )


def test_costs_are_called_bounds_where_there_are_any() -> None:
    assert "bounds" not in str(explained("hello"))
    assert "bounds" not in explained(RAG).describe("passes")
    assert explained(RAG).describe("spans").count("Costs are bounds: ") == 1


def test_the_data_of_a_retrieval() -> None:
    (only,) = explained(RAG, rung="moved", anchor="none").generations
    assert (only.path, only.stage, only.max_tokens, only.num_tokens, only.num_inner) == ("$", 0, 8, 34, 0)
    assert only.all_hit == Cost(moved=12, repaired=0, computed=22)
    assert only.all_new == Cost(moved=12, repaired=0, computed=22, internal=12)
    assert only.notes == ()


def test_a_judge_says_what_it_waits_for_and_who_is_kept_for_it() -> None:
    query = generate(seq(commute(generate(user("write"), n=2, temperature=1.0), user("given")), user("which?")))
    inner, outer = explained(query, seed=3).generations
    assert (inner.num_samples, len(inner.seeds), inner.is_leased, inner.stage) == (2, 2, True, 0)
    assert (outer.num_inner, outer.stage, outer.is_leased) == (2, 1, False)
    assert outer.num_tokens is not None
    text = str(explained(query))
    assert f"prompt: {outer.num_tokens} tokens of 500, and what 2 inner generations will say" in text
    assert "2 samples, seeds " in text
    assert "its KV is kept for the prompt that reads it" in text
    assert [span.kind for span in outer.spans] == ["text"]


def test_a_prompt_that_is_too_long_is_said_to_be() -> None:
    (only,) = explained(RAG, window=40).generations
    assert only.notes == ("$: too long: 34 tokens and 8 more of 40",)
    (unbounded,) = explained("hello", window=None).generations
    assert unbounded.max_tokens == 256
    (bounded,) = explained("hello", window=100).generations
    assert bounded.max_tokens == 91


def test_an_engine_without_spans_is_named() -> None:
    chosen = RunOptions()
    compiled = compile_query(RAG, chosen, model="m")
    known = lower_known(compiled.plan, TEMPLATE, chosen)
    explanation = explain(compiled, known, chosen, window=500, spans_unsupported="it has no rotary embedding")
    assert "spans run with full attention: it has no rotary embedding" in str(explanation)


def test_what_cannot_be_lowered_is_refused_or_unknown_before_its_answers_are_there() -> None:
    strict = ChatTemplate(tiny(FAMILIES["mistral"]))  # user and assistant alternate
    chosen = RunOptions()
    twice = compile_query(generate(seq(user("one"), user("two"))), chosen, model="m")
    with pytest.raises(QueryError, match="chat template refuses these messages"):
        lower_known(twice.plan, strict, chosen)
    waiting = compile_query(generate(seq(generate(user("one")), user("two"))), chosen, model="m")
    explanation = explain(waiting, lower_known(waiting.plan, strict, chosen), chosen, window=None)
    outer = explanation.generations[-1]
    assert (outer.num_tokens, outer.all_hit, outer.spans) == (None, None, ())
    assert outer.notes[0].startswith("nothing is known of this prompt before its answers are there: ")
    assert "prompt: unknown, and what 1 inner generation will say" in str(explanation)


def test_an_explanation_has_a_json_form() -> None:
    plain = json.loads(json.dumps(explained(RAG).to_dict()))
    assert (plain["window"], plain["is_engine_asked"]) == (500, False)
    (only,) = plain["generations"]
    assert only["spans"][0] == {
        "path": "$.query.operands[1].parts[0].operands[0]",
        "start": 13,
        "end": 19,
        "rung": "repair(32)",
        "anchor": "header",
        "num_anchor_tokens": 3,
        "kind": "text",
        "status": None,
    }
    assert only["expected"] is None
    assert only["all_hit"] == {"moved": 0, "repaired": 12, "computed": 34, "internal": 0}


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6), st.integers(0, 8)), max_size=4), st.integers(1, 5))
def test_costs_add_up_to_the_prompt(layout: list[tuple[int, int, int]], rest: int) -> None:
    spans = []
    position = 1
    for gap, length, repaired in layout:
        start = position + gap
        spans.append(Span(start, start + length, NO_ANCHOR, min(repaired, length)))
        position = start + length
    prompt = SpanPrompt(tuple(range(position + rest)), tuple(spans))
    hit, new = bound(prompt, are_there=True), bound(prompt, are_there=False)
    assert hit.moved + hit.computed == len(prompt)
    assert hit.repaired <= hit.computed
    assert (new.moved, new.repaired, new.computed, hit.internal) == (hit.moved, hit.repaired, hit.computed, 0)
    assert new.internal == sum(len(span) for span in spans if span.repair < len(span))


def test_a_span_that_stands_in_a_prompt_twice_is_computed_once() -> None:
    prompt = SpanPrompt((9, 1, 2, 1, 2, 9), (Span(1, 3, NO_ANCHOR), Span(3, 5, NO_ANCHOR)))
    assert bound(prompt, are_there=False) == Cost(moved=4, repaired=0, computed=2, internal=2)


def test_the_passes_are_shown_with_the_rules_that_fired_and_what_they_found() -> None:
    query = generate(seq(seq("a", seq("b")), commute(generate("one"), generate("two")), user("which?")))
    compiled = compile_query(as_generate(query), RunOptions(), model="m")
    explained = _explain_passes(compiled)
    names = [each.name for each in explained]
    assert names[:3] == ["desugar", "simplify", "distribute"]
    by_name = {each.name: each for each in explained}
    assert sum(by_name["simplify"].rules.values()) > 0
    assert by_name["simplify"].tree
    assert any("taken over as a span" in note for note in by_name["distribute"].notes)


def test_stages_are_parts_of_the_whole() -> None:
    explanation = explained(generate(seq(seq(system("Be brief.")), user("Why?")), max_tokens=8))
    whole = explanation.to_dict()
    assert explanation.to_dict("all") == whole
    assert explanation.to_dict("passes") == {"passes": whole["passes"]}
    assert explanation.to_dict("spans") | {"passes": whole["passes"]} == whole
    passes, spans = explanation.describe("passes"), explanation.describe("spans")
    assert "pass simplify: flatten_seq x1\n  before all that looks for candidates" in passes
    assert f"\n{explanation.tree}".replace("\n", "\n  ") in passes
    assert spans.startswith(f"{explanation.tree}\n\nstage 0  $: at most 8 tokens\n")
    assert explanation.describe("all") == f"{passes}\n\n{spans}"
    assert explanation.describe() == str(explanation)
    for look in (explanation.describe, explanation.to_dict):
        with pytest.raises(QueryError, match="there is no stage 'tokens'; stages are passes, spans, all, and None"):
            look("tokens")  # type: ignore[operator]


def test_notebooks_draw_an_explanation() -> None:
    explanation = explained(RAG)
    assert explanation.mermaid().startswith('flowchart TD\n    n0["G max_tokens=8"]\n    n1["✶"]\n')
    assert explanation._repr_mimebundle_() == {
        "text/vnd.mermaid": explanation.mermaid(),
        "image/svg+xml": tree_svg(explanation.root),
        "text/plain": str(explanation),
    }
    assert "root" not in explanation.to_dict()


def test_what_is_too_large_for_mermaid_is_drawn_without_it() -> None:
    drawn = [
        explained(generate(user(commute([f"text {i}" for i in range(number)]), "Which?")), window=None)
        for number in (497, 498)
    ]
    assert [explanation.mermaid().count(" --> ") for explanation in drawn] == [500, 501]
    assert [set(explanation._repr_mimebundle_()) for explanation in drawn] == [
        {"text/vnd.mermaid", "image/svg+xml", "text/plain"},
        {"image/svg+xml", "text/plain"},
    ]


def test_spans_without_an_anchor_and_of_one_token() -> None:
    text = str(explained(generate(user(commute("a", separator=""), "Which?")), rung="moved", anchor="none"))
    assert "1 token, moved, behind nothing, text: $.query.parts[0].operands[0]" in text


def documents(*texts: str, question: str = "Which?", **options: Any) -> Any:
    return generate(seq(system("Be brief."), user(commute(*texts, **options), question)), max_tokens=4)


def test_a_running_engine_says_what_it_would_find() -> None:
    """And what it says comes true; before it runs nobody is asked, and nothing is started to ask."""
    first, second = "The sky is blue and wide. " * 9, "The sea is deep and green. " * 9
    with Session("m", engine="simulator", tokenizer=SpeakingTokenizer()) as s:
        statuses = []
        for query in (documents(first, rung="moved"), documents(second, first, rung="moved"), documents(second, first)):
            (said,) = s.explain(query).generations
            assert said == s.explain(query).generations[0]
            result = s.run(query)
            assert [span.status for span in said.spans] == [span.status for span in result.spans]
            assert said.expected == Expected(
                result.usage.cached, result.usage.prompt - result.usage.cached, result.usage.internal
            )
            statuses.append([span.status for span in said.spans])
        assert statuses == [["new"], ["new", "hit"], ["hit", "hit"]]
        text = str(s.explain(documents(second, first, question="Why?", rung="moved")))
    assert "text, hit: $.query" in text
    assert "  as it stands: " in text
    assert text.endswith(
        "'As it stands' is what the engine would find now, prefix hits too; the other costs are bounds without those."
    )
    closed = Session("m", engine="simulator", tokenizer=SpeakingTokenizer())
    (said,) = closed.explain(documents(first)).generations
    assert (said.expected, [span.status for span in said.spans]) == (None, [None])
    closed.close()


def test_a_judge_is_foreseen_without_its_answers() -> None:
    given = "The sky is blue and wide. " * 9
    query = generate(seq(commute(generate(user("write"), n=2, temperature=1.0), user(given)), user("which?")))
    with Session("m", engine="simulator", tokenizer=SpeakingTokenizer(), max_tokens=5) as s:
        s.prefetch(query)
        inner, outer = s.explain(query).generations
    assert inner.expected is not None
    assert inner.expected.computed == inner.num_tokens
    assert [span.status for span in outer.spans] == ["hit"]


@pytest.mark.parametrize(
    ("word", "notes"),
    [
        (None, ()),
        (EngineDied("it is gone"), ("the engine did not tell what it would find: it is gone",)),
        (QueryError("no"), ("the engine did not tell what it would find: no",)),
    ],
)
def test_an_engine_that_does_not_tell(monkeypatch: pytest.MonkeyPatch, word: Any, notes: tuple[str, ...]) -> None:
    """What a run would raise is no reason to explain less; it is said."""
    register(monkeypatch)
    with Session("m", engine="scripted", script=Script(prediction=word)) as s:
        explanation = s.explain(RAG)
    (only,) = explanation.generations
    assert (only.expected, only.notes) == (None, notes)
    assert [span.status for span in only.spans] == [None, None]
    assert "Costs are bounds: the engine did not tell which spans are there, and" in str(explanation)
    assert explanation.to_dict("spans")["is_engine_asked"]


def test_prompts_of_which_the_engine_tells_and_one_of_which_it_does_not() -> None:
    query = generate(seq(commute(generate(user("write")), user("The sky is blue.")), user("which?")))
    chosen = RunOptions()
    compiled = compile_query(query, chosen, model="m")
    known = lower_known(compiled.plan, TEMPLATE, chosen)
    inner, outer = (each.generation.path for each in known)
    words = {inner: Prediction((), 1, 2, 3), outer: "it is gone"}
    explanation = explain(compiled, known, chosen, window=500, predictions=words)
    assert [each.expected for each in explanation.generations] == [Expected(2, 1, 3), None]
    assert [len(each.notes) for each in explanation.generations] == [0, 1]
    assert "  note: the engine did not tell what it would find: it is gone\n" in str(explanation)
    assert "'As it stands' is what the engine would find now" in str(explanation)


def test_what_is_too_long_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    script = Script(window=30, prediction=Prediction((), 1, 2, 3))
    with Session("m", engine="scripted", script=script) as s:
        explanation = s.explain(RAG)
    (only,) = explanation.generations
    assert (only.expected, len(only.notes)) == (None, 1)
    assert "too long" in only.notes[0]
    assert "the engine did not tell which spans are there" in str(explanation)
