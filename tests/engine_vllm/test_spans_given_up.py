"""Sources that push each other out of a small pool again and again: the request ends in full attention, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import ANSWER, HEADER, continued, document, judge, plain, prompt, start

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import Span, SpanPrompt

pytestmark = pytest.mark.vllm


def with_documents(before: SpanPrompt, gap: int, *documents: tuple[int, ...], repair: int, question: int) -> SpanPrompt:
    """A prompt that goes on with some text, documents behind a header, and a question, in place of its own."""
    ids, spans = [*before.token_ids[: -1 - len(ANSWER)], *range(70, 70 + gap), *HEADER], [*before.spans]
    for tokens in documents:
        spans.append(Span(len(ids), len(ids) + len(tokens), SpanPrompt(HEADER), repair))
        ids += tokens
    return SpanPrompt((*ids, *range(60, 60 + question), *ANSWER), tuple(spans))


def answer(engine: Any, wanted: SpanPrompt, num_tokens: int) -> list[int]:
    """What a leased prompt is answered."""
    name = engine.send(wanted, num_tokens, lease=Lease(consumers=9))
    engine.finish(4000)
    tokens: list[int] = engine.sent[name].tokens
    return tokens


def crowded(engine: Any) -> SpanPrompt:
    """A prompt of three nested sources in a pool of 14 blocks: each can be made where nothing else stays, but not while
    the others do."""
    first = prompt(document(0, 9), repair=3, question=16)
    short = judge(first, answer(engine, first, 20), repair=3)
    second = prompt(document(1, 9), document(2, 20), repair=3, question=12)
    long = continued([second], [answer(engine, second, 1)])
    long = with_documents(long, 3, document(3, 9), document(4, 20), repair=0, question=1)
    outer = continued([short, long], [answer(engine, short, 1), answer(engine, long, 10)])
    return with_documents(outer, 17, document(0, 20), repair=3, question=5)


def assert_nothing_is_left(engine: Any) -> None:
    engine.check()
    audit = engine.scheduler.audit()
    assert not any(audit[name] for name in ("requests", "internal", "held", "families", "pins"))


@pytest.mark.parametrize("lag", [0, 1])
def test_sources_that_push_each_other_out_end_in_full_attention(model_dir: Path, lag: int) -> None:
    engine = start(model_dir, 15, max_model_len=224, lag=lag)
    outer = crowded(engine)
    engine.reset(False)
    for _ in range(2):  # What was computed in full attention is no assembled copy the next time.
        name = engine.send(outer)
        after = engine.send(plain(7, 30))
        engine.finish(4000)
        engine.check()
        assert engine.statuses(name) == ["unsupported"] * 4
        assert "pushed out" in engine.whys(name)[0]
        assert len(engine.sent[after].tokens) == 1
    whole = engine.send(SpanPrompt(outer.token_ids))
    engine.finish()
    assert engine.sent[whole].prefill.num_cached_tokens > 0
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("num_steps", [0, 5, 40])
def test_who_waits_with_others_for_such_sources_ends_too(model_dir: Path, num_steps: int) -> None:
    """One level deeper: what is made for one is waited for by all, and goes on where that one has gone."""
    engine = start(model_dir, 15, max_model_len=224)
    outer = crowded(engine)
    wanted = judge(outer, answer(engine, outer, 4))
    engine.reset(False)
    names = [engine.send(wanted) for _ in range(3)]
    for _ in range(num_steps):
        engine.step()
    if num_steps:
        engine.abort(names.pop(0))
    engine.finish(8000)
    assert [engine.statuses(name) for name in names] == [["unsupported"]] * len(names)
    assert_nothing_is_left(engine)


def test_a_prefetch_that_is_given_up_makes_nothing(model_dir: Path) -> None:
    engine = start(model_dir, 15, max_model_len=224, max_num_batched_tokens=64)
    outer = crowded(engine)
    engine.reset(False)
    name = engine.send(outer, keep=True)
    spans = engine.scheduler.spans
    assert name in spans.by_source.values()
    while not spans.known[name].exact:
        engine.step()
    assert name not in spans.by_source.values()
    engine.finish()
    assert_nothing_is_left(engine)


def test_a_source_that_nobody_waits_for_any_more_ends_too(model_dir: Path) -> None:
    """Its reader found it elsewhere, say, and is done."""
    engine = start(model_dir, 15, max_model_len=224)
    outer = crowded(engine)
    wanted = judge(outer, answer(engine, outer, 4))
    engine.reset(False)
    name = engine.send(wanted)
    for _ in range(5):
        engine.step()
    spans = engine.scheduler.spans
    spans.let_go(name)
    engine.abort(name)
    assert spans.held
    engine.finish(4000)
    assert_nothing_is_left(engine)


def test_a_request_whose_sources_did_fit_keeps_its_spans(model_dir: Path) -> None:
    """However often it is preempted, and they are lost."""
    engine = start(model_dir, 60)
    name = engine.send(prompt(*[document(number) for number in range(4)]), 40)
    for _ in range(15):
        num_tokens = len(engine.sent[name].tokens)
        while len(engine.sent[name].tokens) == num_tokens:
            engine.step()
        engine.reset(True)
    engine.finish()
    assert engine.scheduler.spans.counters["sources"] >= 15 * 4
    assert engine.statuses(name) == ["new"] * 4
    assert_nothing_is_left(engine)


def test_an_answer_that_is_given_up_half_way_says_how_far_it_was(model_dir: Path) -> None:
    """What was sampled before stays, as a client has seen it; the rest is full attention behind that."""
    engine = start(model_dir, 60)
    name = engine.send(prompt(document(0), document(1)), 40)
    while len(engine.sent[name].tokens) < 5:
        engine.step()
    engine.reset(running=True)
    engine.scheduler.spans.known[name].num_made = 1000
    sampled = engine.scheduler.requests[name].num_output_tokens
    engine.finish()
    assert engine.statuses(name) == ["unsupported"] * 2
    assert f"the first {sampled} tokens of its answer were sampled with its spans" in engine.whys(name)[0]
    assert_nothing_is_left(engine)
