"""Sources that are taken over in place, and what protects the others, one rule a test, on the real scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import BLOCK, HEADER, document, plain, prompt, start

from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm

_HEAD = (1, 2, 3, 4, 5, *HEADER)


def prefetch(engine: Any, *sources: tuple[int, ...]) -> None:
    """Have sources in the pool, one after the other, and nothing else."""
    for tokens in sources:
        engine.send(SpanPrompt(tokens), keep=True)
        engine.finish()


def behind_header(*documents: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [(*HEADER, *tokens) for tokens in documents]


def sources(engine: Any, name: str) -> list[Any]:
    """The sources of a request that is known, the head first."""
    found: list[Any] = list(engine.scheduler.spans.known[name].sources)
    return found


def is_here(engine: Any, source: Any) -> bool:
    """Whether a source is found where it was computed."""
    residency, keys = engine.scheduler.spans.residency, source.keys
    return residency.cached(keys.full) is not None and (
        not keys.tail or residency.tail(keys.tail_key, keys.tail) is not None
    )


def resolved(engine: Any, one: SpanPrompt, **options: Any) -> tuple[str, list[bool], list[bool]]:
    """Send and resolve a prompt: which of its sources are taken over then, and which are still where they were."""
    name = engine.send(one, **options)
    engine.scheduler.spans.resolve()
    found = sources(engine, name)
    return name, [source.is_taken for source in found], [is_here(engine, source) for source in found]


def test_a_head_is_not_taken_over(model_dir: Path) -> None:
    """Other requests begin with it. It is as long as the documents, and comes first."""
    engine = start(model_dir, 9, max_model_len=128)
    documents = [document(n, 12) for n in range(4)]
    prefetch(engine, _HEAD, *behind_header(*documents))
    _, taken, here = resolved(engine, prompt(*documents))
    assert taken == [False, True, True, False, False]
    assert here == [True, False, False, True, True]
    engine.finish()
    engine.check()


def test_an_adopted_block_is_not_taken_over(model_dir: Path) -> None:
    """A span with the text of the head has its source in the block that the prompt begins with: taken, it would be
    one block that is missing, not one that is free."""
    engine = start(model_dir, 8, max_model_len=112)
    head, documents = tuple(range(700, 716)), [document(n, 12) for n in range(3)]
    ids, spans = [*head, *head], [Span(16, 32, NO_ANCHOR)]
    for tokens in documents:
        spans.append(Span(len(ids), len(ids) + 12, SpanPrompt(HEADER)))
        ids += tokens
    prefetch(engine, head, *behind_header(*documents))
    name, taken, here = resolved(engine, SpanPrompt((*ids, *range(40, 52)), tuple(spans)))
    assert name not in engine.scheduler.spans.held
    assert taken == [False, False, True, False, False]
    assert here == [True, True, False, True, True]
    engine.finish()
    engine.check()


def test_no_more_is_taken_over_than_is_missing_and_of_the_largest(model_dir: Path) -> None:
    """Three blocks are missing: one source of three, not one of one before it and another of three."""
    engine = start(model_dir, 13, max_model_len=192)
    documents = [document(0, 12), document(1), document(2)]
    prefetch(engine, _HEAD, *behind_header(*documents))
    _, taken, _ = resolved(engine, prompt(*documents))
    assert taken == [False, False, True, False]
    engine.finish()
    engine.check()


def test_what_is_left_of_a_source_goes_before_other_sources(model_dir: Path) -> None:
    """One block is missing, and the source that is taken over has four: all of them are handed out next, so that a
    source that nobody asked for stays whole."""
    engine = start(model_dir, 12, max_model_len=176)
    one, other = document(0, 60), document(1, 12)
    prefetch(engine, *behind_header(document(5, 13)), _HEAD, *behind_header(one, other))
    _, taken, here = resolved(engine, prompt(one, other))
    assert taken == [False, True, False]
    assert here == [True, False, True]
    assert is_here(engine, sources(engine, engine.send(prompt(document(5, 13))))[1])
    engine.finish()
    engine.check()


def test_what_another_request_waits_for_is_taken_over_last(model_dir: Path) -> None:
    engine = start(model_dir, 12, max_model_len=176)
    prefetch(engine, _HEAD, *behind_header(document(0), document(1)))
    one = engine.send(prompt(document(0), document(1)))
    engine.send(prompt(document(0), question=20))
    engine.scheduler.spans.resolve()
    found = sources(engine, one)
    assert [source.is_taken for source in found] == [False, False, True]
    engine.finish()
    engine.check()


def test_what_somebody_uses_is_not_taken_over(model_dir: Path) -> None:
    """A prompt that begins with a source's tokens runs on its blocks."""
    engine = start(model_dir, 14, max_model_len=208)
    prefetch(engine, _HEAD, *behind_header(document(0), document(1)))
    engine.send(SpanPrompt((*HEADER, *document(0), 3, 3, 3)), 20)
    engine.step()
    name, taken, here = resolved(engine, prompt(document(0), document(1), question=25))
    assert name not in engine.scheduler.spans.held
    assert taken == [False, False, True]
    assert here[:2] == [True, True]
    engine.finish()
    engine.check()


def test_only_the_first_in_the_queue_takes_over(model_dir: Path) -> None:
    """Who stands in front of it waits for a source that needs the same memory."""
    engine = start(model_dir, 14, max_model_len=208)
    prefetch(engine, _HEAD, *behind_header(document(0), document(1)))
    engine.send(plain(0, 60), 9)
    engine.step()
    engine.send(prompt(document(2)))
    name, taken, here = resolved(engine, prompt(document(0), document(1)))
    assert name in engine.scheduler.spans.held
    assert (taken, here) == ([False] * 3, [True] * 3)
    engine.finish()
    engine.check()


def test_what_is_read_in_a_step_is_not_handed_out_in_it(model_dir: Path) -> None:
    """Two prompts in one step; the second one's blocks would be the first one's sources, read and written by moves that
    nobody put in order."""
    engine = start(model_dir, 14, max_model_len=208)
    prefetch(engine, *behind_header(document(0)), _HEAD, *behind_header(document(1)))
    engine.send(prompt(document(0)))
    engine.send(prompt(document(1)))
    engine.finish()
    engine.check()


def test_blocks_that_are_not_written_yet_are_not_found(model_dir: Path) -> None:
    """A request ends in the middle of its ranges: what stands before and behind them was moved, they are not there."""
    engine = start(model_dir, 60, max_num_seqs=4, max_num_batched_tokens=5)
    one = prompt(document(0), document(1), document(2), repair=9)
    name = engine.send(one)
    while not any("#" in request.request_id for request in engine.scheduler.running):
        engine.step()
    assert engine.scheduler.spans.family.waiting.keys() == {name}
    engine.abort(name)
    engine.send(one)
    engine.finish()
    engine.check()


@pytest.mark.parametrize("most", [1, 2])
def test_each_rotation_counts(model_dir: Path, most: int) -> None:
    """Documents trade places in a pool that holds them once."""
    engine = start(model_dir, 14, max_model_len=208)
    engine.scheduler.spans.assembler.max_rotations = most
    orders = [(0, 1, 2), (2, 1, 0), (1, 0, 2)]
    statuses = []
    for order in orders[: most + 1]:
        name = engine.send(prompt(*[document(n) for n in order]))
        engine.finish()
        engine.check()
        statuses.append("evicted" in engine.statuses(name))
    assert statuses == [False] * most + [True]


def taken_over(model_dir: Path) -> tuple[Any, str]:
    """An engine in which a request that took its sources over is in the middle of its ranges."""
    engine = start(model_dir, 14, max_model_len=208, max_num_seqs=4, max_num_batched_tokens=5)
    name = engine.send(prompt(*[document(n) for n in range(3)], repair=9))
    while not any("#" in request.request_id for request in engine.scheduler.running):
        engine.step()
    assert engine.scheduler.spans.counters["taken_over"]
    return engine, name


def spoil(engine: Any) -> None:
    """Write to free blocks without a hash, as short requests do that come and go."""
    tails = engine.scheduler.spans.residency.by_block
    for block in engine.scheduler.kv_cache_manager.block_pool.blocks:
        if not block.ref_cnt and block.block_hash is None and block.block_id not in tails:
            engine.worker.values[block.block_id * BLOCK : (block.block_id + 1) * BLOCK] = [0] * BLOCK


def test_what_has_no_hash_is_not_remembered_as_a_source(model_dir: Path) -> None:
    """Aborted before its blocks were full: nobody could tell later whether they were written again."""
    engine, name = taken_over(model_dir)
    engine.abort(name)
    engine.step()
    spoil(engine)
    engine.send(prompt(*[document(n) for n in range(3)], repair=9))
    engine.finish()
    engine.check()


def test_what_lost_its_blocks_is_not_remembered_as_a_source(model_dir: Path) -> None:
    """Its family fell, and it ends while it waits for its sources again."""
    engine, name = taken_over(model_dir)
    engine.preempt(1)
    engine.scheduler.spans.resolve()
    assert name in engine.scheduler.spans.held
    engine.abort(name)
    engine.finish()
    engine.send(prompt(*[document(n) for n in range(3)], repair=9))
    engine.finish()
    engine.check()


def test_a_second_try_is_reported_as_it_went(model_dir: Path) -> None:
    """The first one took its sources over, and fell; now there is memory."""
    engine = start(model_dir, 20, max_model_len=304, max_num_seqs=4, max_num_batched_tokens=20)
    hog = engine.send(plain(0, 100), 60)
    while not engine.sent[hog].tokens:
        engine.step()
    name = engine.send(prompt(document(0), document(1), repair=12))
    while not any("#" in request.request_id for request in engine.scheduler.running):
        engine.step()
    assert engine.scheduler.spans.counters["taken_over"]
    engine.preempt(1)
    engine.abort(hog)
    engine.finish()
    engine.check()
    assert engine.scheduler.spans.counters["fallen"] == 1
    assert not any("in place" in why for why in engine.whys(name))
    assert not engine.scheduler.spans.copies.relocated


def test_what_was_cached_is_counted_once(model_dir: Path) -> None:
    """As with vLLM: a preempted request that finds its own blocks again was not served from the cache, and the cache's
    own counts leave it out."""
    engine = start(model_dir, 60, max_num_batched_tokens=16)
    name = engine.send(prompt(document(0), question=60))
    while engine.scheduler.requests[name] not in engine.scheduler.running:
        engine.step()
    engine.preempt(1)
    stats = engine.scheduler.kv_cache_manager.prefix_cache_stats
    before = (stats.requests, stats.preempted_requests)
    engine.scheduler.spans.resolve()
    assert engine.scheduler.requests[name].num_preemptions == 1
    assert (stats.requests - before[0], stats.preempted_requests - before[1]) == (0, 1)
    engine.finish()
    engine.check()
    prefill = engine.sent[name].prefill
    assert (prefill.num_local_cached_tokens, prefill.num_external_cached_tokens) == (0, 48)


def test_plain_requests_take_copies_before_sources(model_dir: Path) -> None:
    engine = start(model_dir, 9, max_model_len=128)
    prefetch(engine, _HEAD, *behind_header(document(0)))
    name = engine.send(prompt(document(0)))
    found = sources(engine, name)
    engine.finish()
    engine.send(plain(0, 30))
    engine.finish()
    engine.check()
    assert [is_here(engine, source) for source in found] == [True, True]


def test_of_a_prompt_s_copies_the_last_go_first(model_dir: Path) -> None:
    """A follow-up turn finds the front of the assembled prompt, and nothing behind what is missing."""
    engine = start(model_dir, 30, max_model_len=304)
    one = prompt(document(0), document(1), document(2))
    engine.send(one)
    engine.finish()
    num_empty = sum(block.block_hash is None for block in engine.scheduler.spans.residency.pool.blocks[1:])
    num_empty -= len(engine.scheduler.spans.residency.by_block)
    engine.send(plain(0, BLOCK * (num_empty + 3) - 1))
    engine.finish()
    name = engine.send(SpanPrompt((*one.token_ids, 50, 51), one.spans))
    engine.finish()
    engine.check()
    assert engine.sent[name].prefill.num_local_cached_tokens == (len(one) // BLOCK - 3) * BLOCK


def test_what_runs_takes_copies_before_sources(model_dir: Path) -> None:
    """Nothing waits, the pool is full of both, and two answers get a block more in the same step."""
    engine = start(model_dir, 13, max_model_len=128)
    prefetch(engine, _HEAD, *behind_header(document(0)))
    answers = [engine.send(plain(number, 2 * BLOCK - 1), 9) for number in range(2)]
    engine.step()
    name = engine.send(prompt(document(0)))
    found = sources(engine, name)
    engine.step()
    assert engine.sent[name].finished
    assert not engine.scheduler.waiting
    pool = engine.scheduler.spans.residency.pool
    before = pool.get_num_free_blocks()
    engine.step()
    assert pool.get_num_free_blocks() == before - len(answers)
    assert [is_here(engine, source) for source in found] == [True, True]
    engine.finish()
    engine.check()
