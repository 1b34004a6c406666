"""What is computed once for many, and what is never shared, on the real scheduler without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import ANSWER, BLOCK, CLOSING, continued, document, judge, judge_of_many, plain, prompt, start

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import Span, SpanPrompt

pytestmark = pytest.mark.vllm

_HEADER = SpanPrompt((7, 8, 9))


def computed(engine: Any) -> int:
    """Tokens that were computed until now."""
    number: int = engine.scheduler.spans.counters["scheduled_tokens"]
    return number


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("has_spans", [False, True])
def test_samples_share_the_prefill_and_stay_independent(model_dir: Path, has_spans: bool, lag: int) -> None:
    """Eight samples of one prompt: all but its last, unfilled block is computed once."""
    engine = start(model_dir, 120, lag=lag)
    one = prompt(document(0), document(1)) if has_spans else plain(1, 100)
    assert len(one) == 100
    names = [engine.send(one, 12, sampling={"seed": seed, "temperature": 1.0}) for seed in range(8)]
    engine.finish()
    engine.check()
    assert len({tuple(engine.sent[name].tokens) for name in names}) == 8
    # Head and documents behind their header, then the question; or the prompt as it is.
    prefill = 8 + 2 * (3 + 40) + 12 if has_spans else 100
    assert computed(engine) == prefill + 7 * (100 % BLOCK) + 8 * 11


def test_equal_prompts_share_one_assembly(model_dir: Path) -> None:
    """Eight equal ones at once: one is assembled, and the others find it."""
    engine = start(model_dir, 120)
    engine.send(prompt(document(1), document(0)))
    engine.finish()
    before = engine.scheduler.spans.counters["moved_tokens"]
    for _ in range(8):
        engine.send(prompt(document(0), document(1)))
    engine.finish()
    engine.check()
    moved = engine.scheduler.spans.counters["moved_tokens"] - before
    assert moved < 90 + 7 * BLOCK, f"{moved} tokens were moved for eight prompts with 80 in spans"


def test_equal_requests_with_one_new_span_compute_it_once(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    one = prompt(document(0))
    assert len(one) == 60
    for _ in range(8):
        engine.send(one)
    engine.finish()
    engine.check()
    assert engine.scheduler.spans.counters["sources"] == 2
    assert computed(engine) == 8 + (3 + 40) + 12 + 7 * (60 % BLOCK)


def test_two_requests_with_one_new_span_compute_it_once(model_dir: Path) -> None:
    """At two places, behind other text."""
    engine = start(model_dir, 120)
    engine.send(prompt(document(0)))
    engine.send(prompt(document(1), document(0)))
    engine.finish()
    engine.check()
    assert engine.scheduler.spans.counters["sources"] == 3
    assert computed(engine) == 8 + 2 * (3 + 40) + 2 * 12


def test_a_span_that_stands_twice_is_new_in_both_places(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    name = engine.send(prompt(document(0), document(1), document(0)))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"] * 3


def test_assembled_kv_is_not_taken_for_that_of_full_attention(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    one = prompt(document(0, 30), document(1, 30), question=30)
    engine.send(one)
    engine.finish()
    name = engine.send(SpanPrompt(one.token_ids))
    engine.finish()
    engine.check()
    assert engine.sent[name].prefill.num_cached_tokens <= 8
    engine.send(one)
    engine.finish()
    engine.check()


def test_assemblies_that_differ_in_anything_share_nothing_behind_it(model_dir: Path) -> None:
    """The same tokens with other ranges, anchors, fidelity or number of tokens taken over."""
    inner = plain(3, 20)
    engine = start(model_dir, 160)
    first = engine.send(inner, 40, lease=Lease(consumers=99))
    engine.finish()
    tokens = (7, 11, *engine.sent[first].tokens)
    anchor = SpanPrompt(inner.token_ids[:-2])
    ids = (2, 7, 8, 9, *tokens, *range(40, 60), 7, 11)
    start_at, end = 4, 4 + len(tokens)
    variants = [
        Span(start_at, end, _HEADER),
        Span(start_at, end, SpanPrompt((2, 7, 8, 9))),
        Span(start_at, end, _HEADER, 5),
        Span(start_at + 1, end, _HEADER),
        Span(start_at, end - 1, _HEADER),
        Span(start_at, end, anchor, 0, 2),
        Span(start_at, end, anchor, 5, 2),
    ]
    for spans in [(span,) for span in variants] * 2:
        engine.send(SpanPrompt(ids, spans))
        engine.finish()
        engine.check()


def test_a_text_and_an_answer_of_the_same_tokens_share_nothing_behind_their_last_one(model_dir: Path) -> None:
    """Behind the same anchor, too: the last token of an answer is computed in context, that of a text is moved."""
    inner = plain(3, 20)
    anchor = SpanPrompt(inner.token_ids[:-2])
    engine = start(model_dir, 60)
    first = engine.send(inner, 9, lease=Lease(consumers=9))
    engine.finish()
    head = (2, 1, *anchor.token_ids)
    span = (*ANSWER, *engine.sent[first].tokens)
    ids = (*head, *span, *range(40, 80), *ANSWER)
    for num_taken in (len(ANSWER), None):
        engine.send(SpanPrompt(ids, (Span(len(head), len(head) + len(span), anchor, 0, num_taken),)))
        engine.finish()
        engine.check()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("has_documents", [False, True])
def test_a_continued_prompt_never_computes_more_than_stock(model_dir: Path, has_documents: bool, count: int) -> None:
    """Wherever blocks end: stock vLLM finds all full blocks of the inner prompt and its answer."""
    for length in range(20, 20 + BLOCK):
        numbers = []
        for has_spans in (True, False):
            engine = start(model_dir, 80)
            inner = [plain(n, length) for n in range(count)]
            if has_documents:
                inner = [prompt(document(n, 20), document(n + 3, 20), question=length) for n in range(count)]
            if not has_spans:
                inner = [SpanPrompt(one.token_ids) for one in inner]
            names = [engine.send(one, 13, lease=Lease() if has_spans else None) for one in inner]
            engine.finish()
            before = computed(engine)
            outer = engine.send(continued(inner, [engine.sent[name].tokens for name in names], has_spans))
            engine.finish()
            engine.check()
            assert engine.statuses(outer).count("hit") == (len(inner[0].spans) + count) * has_spans
            numbers.append(computed(engine) - before)
        ours, stock = numbers
        # Of each answer the last token, and what is behind it: the end of the turn, or that and the question.
        assert ours == 2 * count + 1 + len(ANSWER)
        assert ours <= stock


@pytest.mark.parametrize("lag", [0, 1])
def test_a_lease_has_all_but_the_last_token_of_an_answer(model_dir: Path, lag: int) -> None:
    """The last sampled token never had KV that anybody could rely on. Here it is the one that fills a block; and an
    answer that stops by a token is known to have stopped when the next step is under way."""
    from symbolic_engine import expected

    inner = plain(3, 20)
    answer = expected(inner, 28)
    assert answer.index(answer[-1]) == 27
    engine = start(model_dir, 60, lag=lag)
    name = engine.send(inner, 60, lease=Lease(), sampling={"stop_token_ids": [answer[-1]]})
    engine.finish()
    assert engine.sent[name].tokens == answer
    outer = engine.send(judge(inner, answer))
    engine.finish()
    engine.check()
    assert engine.statuses(outer) == ["hit"]


@pytest.mark.parametrize("cut", [0, 3])
def test_an_answer_that_is_cut_from_outside_keeps_report_and_lease(model_dir: Path, cut: int) -> None:
    """At a stop string vLLM's frontend aborts the request: no last output brings the report. The text that counts may
    be shorter than what was generated."""
    engine = start(model_dir, 60)
    inner = prompt(document(0))
    name = engine.send(inner, 60, lease=Lease())
    while len(engine.sent[name].tokens) < 19:
        engine.step()
    assert engine.statuses(name) == ["new"]
    tokens = list(engine.sent[name].tokens)
    engine.abort(name)
    outer = engine.send(judge(inner, tokens[: len(tokens) - cut]))
    engine.finish()
    engine.check()
    assert engine.statuses(outer) == ["hit"]
    assert computed(engine) < 8 + 43 + 12 + 19 + 30


@pytest.mark.parametrize("repair", [0, 2])
@pytest.mark.parametrize("has_spans", [False, True])
def test_between_answers_that_were_cut_off_their_last_tokens_are_computed(
    model_dir: Path, has_spans: bool, repair: int
) -> None:
    engine = start(model_dir, 120)
    inner = prompt(document(0)) if has_spans else plain(3, 30)
    inner = SpanPrompt((*inner.token_ids[: -len(ANSWER)], CLOSING, *ANSWER), inner.spans)
    names = [engine.send(inner, 20 + n, lease=Lease(), sampling={"seed": n, "temperature": 1.0}) for n in range(3)]
    engine.finish()
    before = computed(engine)
    outer = judge_of_many(inner, [engine.sent[name].tokens for name in names], repair)
    assert [span.end for span in outer.spans[:-1]] == [span.start for span in outer.spans[1:]]
    name = engine.send(outer)
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["hit"] * 3
    # The head and what stands behind the last answer, too.
    assert computed(engine) - before == outer.spans[0].start + 3 * (repair + 1) + 4


def test_a_lease_ends_with_its_consumer_and_by_time(model_dir: Path) -> None:
    engine = start(model_dir, 60)
    inner = plain(1, 20)
    first = engine.send(inner, 9, lease=Lease())
    engine.finish()
    leases = engine.scheduler.spans.residency.leases
    assert len(leases) == 1
    engine.send(judge(inner, engine.sent[first].tokens))
    engine.finish()
    assert not leases
    engine.send(inner, 10, lease=Lease(seconds=60))
    engine.finish()
    assert len(leases) == 1
    engine.scheduler.spans.residency.clock = lambda: float("inf")
    engine.send(plain(2, 20))
    engine.finish()
    assert not leases


def test_a_prompt_that_continues_a_lease_consumes_it_once(model_dir: Path) -> None:
    """Its head comes from there too."""
    engine = start(model_dir, 60)
    inner = plain(1, 20)
    first = engine.send(inner, 9, lease=Lease(consumers=2))
    engine.finish()
    for num_left in (1, 0):
        outer = engine.send(continued([inner], [engine.sent[first].tokens], has_spans=True))
        engine.finish()
        assert engine.statuses(outer) == ["hit"]
        assert len(engine.scheduler.spans.residency.leases) == num_left


def test_an_answer_that_never_began_is_no_lease(model_dir: Path) -> None:
    engine = start(model_dir, 60, max_num_batched_tokens=20)
    name = engine.send(plain(1, 60), 9, lease=Lease())
    engine.step()
    engine.step()
    engine.abort(name)
    assert not engine.scheduler.spans.residency.by_block


def test_a_prompt_that_is_kept_is_a_source(model_dir: Path) -> None:
    """What is sampled behind it is none of it."""
    engine = start(model_dir, 60)
    engine.send(SpanPrompt((*_HEADER.token_ids, *document(0))), 8, keep=True)
    engine.finish()
    name = engine.send(prompt(document(0)))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["hit"]


def test_copies_are_what_goes_first(model_dir: Path) -> None:
    """Moved KV can be moved again. A prompt most of which was computed, and one whose answer is leased, are as dear as
    any other; a preempted one is copies like one that ended."""
    engine = start(model_dir, 60)
    copies = engine.scheduler.spans.copies._hashes
    engine.send(prompt(document(0), question=100))
    engine.finish()
    engine.send(prompt(document(0), question=11), 9, lease=Lease())
    engine.finish()
    assert not copies
    name = engine.send(prompt(document(1), document(0)), 9)
    while not engine.sent[name].tokens:
        engine.step()
    engine.preempt(1)
    assert copies
    copies.clear()
    engine.finish()
    assert copies


def test_tenants_share_nothing(model_dir: Path) -> None:
    """Sources, families and assemblies are those of one salt."""
    engine = start(model_dir, 120)
    one = prompt(document(0), document(1), repair=3)
    for salt in ("a", "b", None):
        first = engine.send(one, salt=salt)
        engine.finish()
        again = engine.send(one, salt=salt)
        engine.finish()
        engine.check()
        assert engine.statuses(first) == ["new"] * 2
        assert engine.statuses(again) == ["hit"] * 2
        assert engine.sent[first].prefill.num_local_cached_tokens == 0
        assert engine.sent[again].prefill.num_local_cached_tokens > 0
