"""What the span scheduler must never do, one invariant a test, on the real scheduler without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spanflow.lowering.prompt import Span, SpanPrompt

pytestmark = pytest.mark.vllm

_HEADER = (7, 8, 9)
_BLOCK = 16


def start(model_dir: Path, num_blocks: int, **options: Any) -> Any:
    from symbolic_engine import SymbolicEngine

    return SymbolicEngine(model_dir, num_blocks, _BLOCK, headers=[_HEADER], **options)


def document(number: int, length: int = 40) -> tuple[int, ...]:
    return tuple(range(100 + 60 * number, 100 + 60 * number + length))


def prompt(*documents: tuple[int, ...], repair: int = 0) -> SpanPrompt:
    ids: list[int] = [1, 2, 3, 4, 5, *_HEADER]
    spans = []
    for tokens in documents:
        spans.append(Span(len(ids), len(ids) + len(tokens), SpanPrompt(_HEADER), repair))
        ids += tokens
    return SpanPrompt((*ids, *range(40, 50), 7, 11), tuple(spans))


def plain(number: int, length: int) -> SpanPrompt:
    return SpanPrompt((900, number, *range(length - 2)))


def test_nobody_s_blocks_are_freed_late(model_dir: Path) -> None:
    """A connector that delivers KV elsewhere makes vLLM hold finished requests' blocks back; ours is none."""
    scheduler = start(model_dir, 20).scheduler
    assert (scheduler.defer_block_free, scheduler.requires_kv_delivery) == (False, False)


def test_a_paused_engine_resolves_nothing(model_dir: Path) -> None:
    from spanflow.engine.vllm.contract import PauseState

    engine = start(model_dir, 60)
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.send(prompt(document(0)))
    for _ in range(5):
        engine.scheduler.schedule()
    assert engine.scheduler.spans.counters["sources"] == 0
    engine.scheduler.set_pause_state(PauseState.UNPAUSED)
    engine.finish()
    engine.check()


def test_no_more_requests_hold_blocks_than_there_are_seats(model_dir: Path) -> None:
    engine = start(model_dir, 120, max_num_seqs=2)
    for number in range(6):
        engine.send(prompt(document(number)))
    engine.finish()
    for number in range(6):
        engine.send(prompt(document(number), document(number - 1)), 5)
    scheduler, most = engine.scheduler, 0
    while scheduler.has_requests():
        engine.step()
        most = max(most, len(scheduler.running) + len(scheduler.kv_holding_waiting))
    engine.check()
    assert most == 2


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
    assert moved < 90 + 7 * _BLOCK, f"{moved} tokens were moved for eight prompts with 80 in spans"


def test_what_is_moved_counts_as_cached(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    name = engine.send(prompt(document(0), repair=3))
    engine.finish()
    stats = engine.sent[name].prefill
    # All but what is repaired, the question and the last header.
    assert (stats.num_prompt_tokens, stats.num_external_cached_tokens) == (60, 60 - 3 - 12)


def test_blocks_that_nobody_will_write_are_not_found(model_dir: Path) -> None:
    """A request is preempted in the step that scheduled it: its blocks have hashes, and no KV."""
    engine = start(model_dir, 60)
    name = engine.send(plain(1, 50))
    scheduler = engine.scheduler
    scheduler.schedule()
    request = scheduler.requests[name]
    hashes = list(request.block_hashes)
    assert len(hashes) == 3
    assert all(scheduler.kv_cache_manager.block_pool.get_cached_block(h, [0]) for h in hashes)
    # As vLLM has it when a request of higher priority takes the memory: what was computed before this step.
    request.num_computed_tokens = 0
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    assert not any(scheduler.kv_cache_manager.block_pool.get_cached_block(h, [0]) for h in hashes)


def test_plain_requests_do_not_starve_a_span_request(model_dir: Path) -> None:
    """Short requests that keep coming take all memory that ends, and a prompt of a third of the pool gets its own."""
    engine = start(model_dir, 40, max_model_len=256)
    for number in range(5):
        engine.send(plain(number, 100), 60)
    engine.step()
    name = engine.send(prompt(*[document(n, 30) for n in range(7)]))
    for number in range(5, 300):
        if len(engine.scheduler.waiting) < 4:
            engine.send(plain(number, 100), 40 + number % 17)
        engine.step()
    assert engine.sent[name].finished
    engine.finish()
    engine.check()
