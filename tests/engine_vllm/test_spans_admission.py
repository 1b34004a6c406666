"""Which spans are served, which anchors are believed, and whose, one rule a test, on the real scheduler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from symbolic_prompts import ANSWER, CLOSING, HEADER, behind, document, judge, plain, prompt, start

from spanflow.engine.assembly import assemble, source_maker
from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm


def one(engine: Any, wanted: SpanPrompt, max_tokens: int = 1, **options: Any) -> str:
    """Ask alone, check the answer; the request's name."""
    name: str = engine.send(wanted, max_tokens, **options)
    engine.finish(200)
    engine.check()
    return name


def is_foreign(engine: Any, wanted: SpanPrompt) -> bool:
    """Whether a prompt is refused for an anchor; else it is answered."""
    name = engine.send(wanted)
    engine.finish()
    is_refused = "foreign anchor" in engine.answers(name).get("error", "")
    assert len(engine.sent[name].tokens) == (not is_refused)
    if is_refused:
        engine.sent.pop(name)
    engine.check()
    return is_refused


@pytest.mark.parametrize("name", ["mm_features", "prompt_embeds"])
def test_a_prompt_that_is_more_than_token_ids_runs_exactly(model_dir: Path, name: str) -> None:
    """A picture's KV depends on more than the ids of its place-holders, by which a source is named."""
    from spanflow.engine.vllm.admission import why_exact

    engine = start(model_dir, 60)
    wanted = prompt(document(0))
    state = engine.scheduler.spans.known[engine.send(wanted)]
    assert why_exact(engine.scheduler.spans, state, 1) == ""
    setattr(state.request, name, [SimpleNamespace()])
    assert why_exact(engine.scheduler.spans, state, 1) == "the prompt is not made of token ids alone"


def test_an_anchor_s_own_spans_must_fit_the_window(model_dir: Path) -> None:
    """An inner prompt ran exactly, since its span behind a long header is longer than the window. What takes its answer
    over fits, but what it would be moved from is assembled of a source that doesn't."""
    from symbolic_engine import SymbolicEngine

    header = tuple(range(600, 620))
    engine = SymbolicEngine(model_dir, 60, 16, headers=[header], max_model_len=64)
    inner = SpanPrompt((1, *range(100, 145), *ANSWER), (Span(1, 46, SpanPrompt(header)),))
    first = one(engine, inner, 4, lease=Lease())
    assert engine.statuses(first) == ["unsupported"]
    outer = one(engine, judge(inner, engine.sent[first].tokens))
    assert engine.statuses(outer) == ["unsupported"]
    assert "65 tokens, too many for the window of 64" in engine.whys(outer)[0]


def test_an_anchor_s_own_spans_must_fit_the_pool(model_dir: Path) -> None:
    """The same of an inner prompt of many documents and an outer one that is short."""
    engine = start(model_dir, 14, max_model_len=208)
    inner = prompt(*[document(n, 15) for n in range(7)])
    first = one(engine, inner, 4, lease=Lease())
    assert engine.statuses(first) == ["unsupported"] * 7
    outer = one(engine, judge(inner, engine.sent[first].tokens))
    assert engine.statuses(outer) == ["unsupported"]
    assert "of the KV pool's 13" in engine.whys(outer)[0]


@pytest.mark.parametrize("lengths", [(4, 40), (40, 4), (4, 4)])
def test_the_longest_source_behind_an_anchor_must_fit_the_pool(model_dir: Path, lengths: tuple[int, int]) -> None:
    """Two answers to one prompt behind a long head, which is shared and stays where a source is assembled."""
    engine = start(model_dir, 17, max_model_len=256)
    inner = behind(96, document(0, 15))
    anchor, ids, spans = SpanPrompt(inner.token_ids[: -len(ANSWER)], inner.spans), [2, 1, 2], []
    for length in lengths:
        answer = engine.sent[one(engine, inner, length, lease=Lease())].tokens
        spans.append(Span(len(ids), len(ids) + len(ANSWER) + length, anchor, 0, len(ANSWER)))
        ids += [*ANSWER, *answer, CLOSING]
    outer = one(engine, SpanPrompt((*ids, 60, *ANSWER), tuple(spans)))
    fits = 40 not in lengths
    assert engine.statuses(outer) == (["hit"] if fits else ["unsupported"]) * 2
    assert fits or "of the KV pool's 16" in engine.whys(outer)[0]


def test_a_long_answer_needs_no_room_behind_a_source(model_dir: Path) -> None:
    """The outer prompt is short and fits with its answer; the inner one is long, and is asked for one token."""
    engine = start(model_dir, 14, max_model_len=208)
    inner = prompt(*[document(n) for n in range(3)])
    first = one(engine, inner, 4, lease=Lease())
    outer = one(engine, judge(inner, engine.sent[first].tokens), 70)
    assert engine.statuses(outer) == ["hit"]


def test_the_last_source_needs_its_anchor_beside_the_others(model_dir: Path) -> None:
    """Three sources of two blocks behind a header of three, two of which hold nothing that is moved."""
    from symbolic_engine import SymbolicEngine

    header = tuple(range(600, 640))
    documents = [document(n, 20) for n in range(3)]
    ids, spans = [1], []
    for tokens in documents:
        spans.append(Span(len(ids), len(ids) + 20, SpanPrompt(header)))
        ids += tokens
    wanted = SpanPrompt((*ids, 5, 5), tuple(spans))
    statuses = {}
    for num_blocks in (9, 10):
        engine = SymbolicEngine(model_dir, 1 + num_blocks, 16, headers=[header], max_model_len=16 * num_blocks)
        statuses[num_blocks] = engine.statuses(one(engine, wanted))
    assert statuses == {9: ["unsupported"] * 3, 10: ["new"] * 3}


def test_the_prompt_needs_its_blocks_beside_the_head_s(model_dir: Path) -> None:
    """Documents are taken over, the head isn't: with five blocks for the prompt there must be one more."""
    statuses = {}
    for num_blocks in (5, 6):
        engine = start(model_dir, 1 + num_blocks, max_model_len=16 * num_blocks)
        statuses[num_blocks] = engine.statuses(one(engine, prompt(document(0, 12), question=50)))
    assert statuses == {5: ["unsupported"], 6: ["new"]}


def test_the_answer_needs_its_blocks(model_dir: Path) -> None:
    """It can't push the head out, which is pinned by nobody but shared by all that follow."""
    statuses = {}
    for max_tokens in (1, 9):
        engine = start(model_dir, 7, max_model_len=96)
        statuses[max_tokens] = engine.statuses(one(engine, prompt(document(0, 12), question=50), max_tokens))
    assert statuses == {1: ["new"], 9: ["unsupported"]}


def test_a_document_that_stands_many_times_has_one_source(model_dir: Path) -> None:
    engine = start(model_dir, 10, max_model_len=144)
    name = one(engine, prompt(*[document(0, 12)] * 8))
    assert engine.statuses(name) == ["new"] * 8


def test_a_source_that_is_read_from_two_places_counts_from_the_first() -> None:
    """Whichever of them comes first in the prompt."""
    from spanflow.engine.vllm.admission import why_too_big

    needed = []
    for repairs in ((0, 32), (32, 0)):
        asked = prompt(document(0), document(0))
        spans = [replace(span, repair=repair) for span, repair in zip(asked.spans, repairs, strict=True)]
        assembly = assemble(SpanPrompt(asked.token_ids, tuple(spans)), source_maker())
        pools: list[Any] = [SimpleNamespace(block_size=16, num_blocks=number) for number in range(12)]
        needed.append([bool(why_too_big(pool, assembly, 1)) for pool in pools].count(True))
    assert needed == [7, 7]


def test_a_beginning_that_goes_on_behind_the_span_is_no_anchor(model_dir: Path) -> None:
    """Spans and all: the model would read of it what the prompt shows only later."""
    engine = start(model_dir, 60)
    first, ids = Span(2, 12, SpanPrompt(HEADER)), (*range(10, 60), 5)
    for size in (20, 22, 25):
        anchor = SpanPrompt(ids[:size], (first,))
        assert is_foreign(engine, SpanPrompt(ids, (first, Span(20, 24, anchor)))) == (size > 20)


def test_what_an_answer_stands_behind_is_no_anchor_of_a_text(model_dir: Path) -> None:
    """That its prompt ran under a lease says that the tenant has seen the answer, and nothing of other text."""
    engine = start(model_dir, 60)
    inner = plain(1, 40)
    tokens = engine.sent[one(engine, inner, 9, lease=Lease(consumers=2))].tokens
    outer = judge(inner, tokens)
    (span,), end = outer.spans, len(outer)
    assert not is_foreign(engine, outer)
    text = Span(end - 4, end - 2, span.anchor)
    assert is_foreign(engine, SpanPrompt(outer.token_ids, (span, text)))


def test_a_header_with_spans_is_no_header(model_dir: Path) -> None:
    """Its KV is not that of the template's header, and the prompt may not show what its spans stand behind."""
    engine = start(model_dir, 60)
    anchor = SpanPrompt(HEADER, (Span(1, 3, SpanPrompt((66, 67, 68))),))
    assert is_foreign(engine, SpanPrompt((1, *range(20, 40), 5), (Span(1, 21, anchor),)))


def test_an_anchor_inside_the_prompt_has_no_spans_but_the_prompt_s(model_dir: Path) -> None:
    """What stands before a span, spans included, is an anchor; the same tokens with others are none."""
    engine = start(model_dir, 60)
    first = Span(2, 12, SpanPrompt(HEADER))
    ids = (*range(10, 60), 5)
    own, other = SpanPrompt(ids[:20], (first,)), SpanPrompt(ids[:20], (Span(2, 12, SpanPrompt((66, 67))),))
    assert not is_foreign(engine, SpanPrompt(ids, (first, Span(30, 40, own))))
    assert is_foreign(engine, SpanPrompt(ids, (first, Span(30, 40, other))))
    inside = SpanPrompt(ids[1:20], (Span(1, 11, SpanPrompt((66, 67))),))
    assert is_foreign(engine, SpanPrompt(ids, (first, Span(30, 40, inside))))


@pytest.mark.parametrize(("first", "end"), [(0, 30), (1, 30), (0, 15)])
def test_what_stands_behind_a_span_is_no_anchor(model_dir: Path, first: int, end: int) -> None:
    """Nor the span's own text: the model is to read it later, also where it goes on from the prompt's beginning."""
    engine = start(model_dir, 60)
    ids = (*range(10, 60), 5)
    assert is_foreign(engine, SpanPrompt(ids, (Span(10, 20, SpanPrompt(ids[first:end])),)))
    assert not is_foreign(engine, SpanPrompt(ids, (Span(30, 40, SpanPrompt(ids[first:end])),)))


def test_an_answer_is_that_of_its_assembly(model_dir: Path) -> None:
    """The same tokens generated behind spans, and behind full attention, are two inner prompts."""
    engine = start(model_dir, 60)
    inner = prompt(document(0))
    first = one(engine, SpanPrompt(inner.token_ids), 9, lease=Lease())
    tokens = engine.sent[first].tokens
    name = engine.send(judge(inner, tokens))
    engine.finish()
    assert "never ran under a lease" in engine.answers(name)["error"]
    engine.sent.pop(name)
    assert engine.statuses(one(engine, judge(SpanPrompt(inner.token_ids), tokens))) == ["hit"]


def test_an_answer_is_taken_over_under_its_own_adapter_alone(model_dir: Path) -> None:
    from spanflow.engine.vllm.contract import LoRARequest

    engine = start(model_dir, 60)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    red, blue = LoRARequest("red", 1, "/red"), LoRARequest("blue", 2, "/blue")
    inner = plain(1, 20)
    first = engine.send(inner, 9, lease=Lease(consumers=9), lora_request=red)
    engine.finish()
    outer = judge(inner, engine.sent[first].tokens)
    for adapter, is_refused in ((blue, True), (None, True), (red, False)):
        name = engine.send(outer, lora_request=adapter)
        engine.finish()
        assert ("never ran under a lease" in engine.answers(name).get("error", "")) == is_refused


def test_only_a_lease_lets_others_take_an_answer_over(model_dir: Path) -> None:
    engine = start(model_dir, 60)
    inner = prompt(document(0))
    first = one(engine, inner, 9)
    name = engine.send(judge(inner, engine.sent[first].tokens))
    engine.finish()
    assert "never ran under a lease" in engine.answers(name)["error"]


def test_a_tenant_releases_its_own_leases_alone(model_dir: Path) -> None:
    from spanflow.engine.payload import Ask, encode
    from spanflow.engine.vllm.admission import admit

    engine = start(model_dir, 60)
    inner = plain(1, 20)
    engine.send(inner, 9, lease=Lease(), salt="a")
    engine.finish()
    spans = engine.scheduler.spans
    assert len(spans.residency.leases) == 1
    for salt, num_left in (("b", 1), (None, 1), ("a", 0)):
        name = engine.send(plain(2, 20), salt=salt)
        request = engine.scheduler.requests[name]
        admit(spans, request, encode(Ask(releases=(inner.digest,))))
        assert len(spans.residency.leases) == num_left
    engine.finish()


def test_an_empty_anchor_is_believed(model_dir: Path) -> None:
    engine = start(model_dir, 60)
    assert not is_foreign(engine, SpanPrompt((*range(10, 60), 5), (Span(10, 20, NO_ANCHOR),)))
