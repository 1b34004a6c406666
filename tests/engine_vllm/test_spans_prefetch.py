"""A reader that comes while its prefetch still runs waits for it, and computes nothing twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spanflow.lowering.prompt import Span, SpanPrompt

pytestmark = pytest.mark.vllm

_HEADER = (7, 8, 9)
_BLOCK = 16
DOCUMENTS = [tuple(range(100 + 100 * number, 190 + 100 * number)) for number in range(3)]


def start(model_dir: Path, **options: Any) -> Any:
    """An engine whose steps are short, and which has the head that all readers begin with."""
    from symbolic_engine import SymbolicEngine

    engine = SymbolicEngine(model_dir, 120, _BLOCK, headers=[_HEADER], max_num_batched_tokens=32, **options)
    engine.send(reader(DOCUMENTS[2]))
    engine.finish()
    engine.scheduler.spans.counters.clear()
    return engine


def source(document: tuple[int, ...]) -> SpanPrompt:
    return SpanPrompt((*_HEADER, *document))


def reader(*documents: tuple[int, ...], repair: int = 0, anchor: SpanPrompt | None = None) -> SpanPrompt:
    ids: list[int] = [1, 2, 3, 4, 5, *_HEADER]
    spans = []
    for tokens in documents:
        spans.append(Span(len(ids), len(ids) + len(tokens), anchor or SpanPrompt(_HEADER), repair))
        ids += tokens
    return SpanPrompt((*ids, *range(40, 50), 7, 11), tuple(spans))


def counts(engine: Any) -> tuple[int, int]:
    """Tokens computed, and sources that were made for a reader."""
    counters = engine.scheduler.spans.counters
    return counters["scheduled_tokens"], counters["sources"]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("steps", range(7))
def test_nothing_is_computed_twice(model_dir: Path, lag: int, policy: str, steps: int) -> None:
    """Whenever the reader comes, as many tokens are computed as where it comes when all is done."""
    found = []
    for wait in (steps, 50):
        engine = start(model_dir, lag=lag, scheduling_policy=policy)
        for document in DOCUMENTS[:2]:
            engine.send(source(document), keep=True)
        for _ in range(wait):
            engine.step()
        name = engine.send(reader(*DOCUMENTS[1::-1], repair=4))
        engine.finish()
        engine.check()
        assert engine.sent[name].finished
        found.append(counts(engine))
    assert found[0] == found[1]
    assert found[0][1] == 0


def test_a_prefetch_whose_anchor_has_spans_is_waited_for_too(model_dir: Path) -> None:
    engine = start(model_dir)
    first = reader(DOCUMENTS[0])
    anchor = SpanPrompt(first.token_ids[: first.spans[0].end], first.spans)
    kept = SpanPrompt((*anchor.token_ids, *DOCUMENTS[1]), anchor.spans)
    engine.send(kept, keep=True)
    engine.step()
    ids = (*anchor.token_ids, 6, *DOCUMENTS[1], 41, 42, 7, 11)
    span = Span(len(anchor) + 1, len(anchor) + 1 + len(DOCUMENTS[1]), anchor)
    name = engine.send(SpanPrompt(ids, (*anchor.spans, span)))
    engine.finish()
    engine.check()
    assert engine.sent[name].finished
    assert counts(engine)[1] == 1  # what the prefetch itself takes


@pytest.mark.parametrize("steps", range(5))
def test_a_prefetch_that_is_aborted_lets_its_reader_go(model_dir: Path, steps: int) -> None:
    engine = start(model_dir)
    prefetch = engine.send(source(DOCUMENTS[0]), keep=True)
    engine.step()
    name = engine.send(reader(DOCUMENTS[0]))
    for _ in range(steps):
        engine.step()
    if not engine.sent[prefetch].finished:
        engine.abort(prefetch)
    engine.finish()
    engine.check()
    assert engine.sent[name].finished
    assert not engine.scheduler.spans.by_source


def test_a_reader_that_is_aborted_leaves_the_prefetch_alone(model_dir: Path) -> None:
    engine = start(model_dir)
    prefetch = engine.send(source(DOCUMENTS[0]), keep=True)
    engine.step()
    name = engine.send(reader(DOCUMENTS[0]))
    engine.step()
    engine.abort(name)
    engine.finish()
    assert engine.sent[prefetch].finished
    again = engine.send(reader(DOCUMENTS[0]))
    engine.finish()
    engine.check()
    assert engine.statuses(again) == ["hit"]


@pytest.mark.parametrize("is_reset", [False, True])
def test_preempted_it_is_still_waited_for(model_dir: Path, is_reset: bool) -> None:
    engine = start(model_dir)
    engine.send(source(DOCUMENTS[0]), keep=True)
    engine.step()
    name = engine.send(reader(DOCUMENTS[0]))
    engine.step()
    if is_reset:
        engine.reset(running=True)
    else:
        engine.preempt(1)
    engine.finish()
    engine.check()
    assert engine.sent[name].finished
    assert counts(engine)[1] == is_reset  # a reset forgets the head as well


def test_a_prefetch_that_stands_behind_others_comes_before_its_reader(model_dir: Path) -> None:
    """One seat, and many requests between the reader and its prefetch, which nobody hurries by itself."""
    engine = start(model_dir, scheduling_policy="priority", max_num_seqs=1)
    engine.send(source(DOCUMENTS[0]), keep=True, priority=9)
    others = [engine.send(SpanPrompt((900, at, *range(30))), 20, priority=5) for at in range(6)]
    name = engine.send(reader(DOCUMENTS[0]), priority=1)
    while not engine.sent[name].finished:
        engine.step()
    assert not any(engine.sent[other].finished for other in others)
    assert counts(engine)[1] == 0
    engine.finish()
    engine.check()


@pytest.mark.parametrize("max_tokens", [2, 60])
def test_nobody_waits_for_an_answer(model_dir: Path, max_tokens: int) -> None:
    engine = start(model_dir)
    long = engine.send(source(DOCUMENTS[0]), max_tokens, keep=True)
    engine.step()
    name = engine.send(reader(DOCUMENTS[0]))
    while not engine.sent[name].finished:
        engine.step()
    assert counts(engine)[1] == 1
    assert max_tokens == 2 or not engine.sent[long].finished
    engine.finish()
    engine.check()


def test_tenants_do_not_wait_for_each_other(model_dir: Path) -> None:
    engine = start(model_dir)
    engine.send(source(DOCUMENTS[0]), keep=True, salt="a")
    name = engine.send(reader(DOCUMENTS[0]), salt="b")
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"]
    assert counts(engine)[1] == 2  # a head and a document of its own


def test_of_two_prefetches_of_one_document_the_first_counts(model_dir: Path) -> None:
    engine = start(model_dir)
    first, second = (engine.send(source(DOCUMENTS[0]), keep=True) for _ in range(2))
    name = engine.send(reader(DOCUMENTS[0]))
    engine.step()
    engine.abort(second)
    engine.finish()
    engine.check()
    assert engine.sent[first].finished
    assert engine.sent[name].finished
    assert counts(engine)[1] == 0


@pytest.mark.parametrize("held_open", ["by its client", "by a grammar that is being compiled"])
def test_nobody_waits_for_what_others_hold_open(model_dir: Path, held_open: str) -> None:
    from spanflow.engine.vllm.contract import StructuredOutputsParams

    engine = start(model_dir)
    if held_open == "by its client":
        other = engine.send(source(DOCUMENTS[0]), keep=True, resumable=True)
    else:
        other = engine.send(
            source(DOCUMENTS[0]), keep=True, sampling={"structured_outputs": StructuredOutputsParams(json="{}")}
        )
    name = engine.send(reader(DOCUMENTS[0]))
    for _ in range(20):
        engine.step()
    assert engine.sent[name].finished
    assert other in engine.scheduler.requests
    assert counts(engine)[1] == 1
    engine.abort(other)
    engine.check()


def test_nobody_waits_for_what_runs_exactly(model_dir: Path) -> None:
    """It makes no source: its spans are computed in context."""
    engine = start(model_dir)
    engine.send(source(DOCUMENTS[0]), keep=True)
    engine.finish()
    first = reader(DOCUMENTS[0])
    anchor = SpanPrompt(first.token_ids[: first.spans[0].end], first.spans)
    kept = SpanPrompt((*anchor.token_ids, *DOCUMENTS[1]), anchor.spans)
    other = engine.send(kept, keep=True, sampling={"prompt_logprobs": 1})
    engine.step()
    ids = (*anchor.token_ids, 6, *DOCUMENTS[1], 41, 42, 7, 11)
    name = engine.send(SpanPrompt(ids, (*anchor.spans, Span(len(anchor) + 1, len(anchor) + 91, anchor))))
    engine.step()
    made = [r for r in engine.scheduler.requests.values() if r.request_id.startswith("spanflow-source")]
    assert any(request.prompt_token_ids[-90:] == list(DOCUMENTS[1]) for request in made)
    assert not engine.sent[other].finished
    engine.finish()
    engine.check()
    assert engine.sent[name].finished


def test_a_source_that_was_here_once_is_evicted_and_not_new(model_dir: Path) -> None:
    """Whether a prompt asked for it, or nobody but a prefetch did."""
    engine = start(model_dir)
    engine.send(source(DOCUMENTS[0]), keep=True)
    engine.send(reader(DOCUMENTS[1]))
    engine.finish()
    engine.reset(running=False)
    name = engine.send(reader(*DOCUMENTS[:2]))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["evicted"] * 2
