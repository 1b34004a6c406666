"""What stands before the first span: computed with its prompt, found in it, materialised only for many; on the real
scheduler without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import ANSWER, BLOCK, HEADER, behind, document, start

from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm


def engine_with(model_dir: Path, *documents: tuple[int, ...], **options: Any) -> Any:
    """An engine that has these documents and nothing else."""
    engine = start(model_dir, 120, **options)
    for tokens in documents:
        engine.send(SpanPrompt((*HEADER, *tokens)), keep=True)
        engine.finish()
    return engine


def run(engine: Any, *prompts: SpanPrompt) -> tuple[int, int, int]:
    """Sources made, tokens computed, and steps, for prompts that come together."""
    counters, first = engine.scheduler.spans.counters, len(engine.steps)
    sources = counters["sources"]
    for one in prompts:
        engine.send(one)
    engine.finish()
    engine.check()
    steps = [step.total_num_scheduled_tokens for step in engine.steps[first:] if step.total_num_scheduled_tokens]
    return counters["sources"] - sources, sum(steps), len(steps)


@pytest.mark.parametrize("head", [5, 16, 24, 40])
def test_a_head_comes_with_its_prompt_and_is_found_in_it(model_dir: Path, head: int) -> None:
    engine = engine_with(model_dir, document(0), document(1))
    assert run(engine, behind(head, document(0))) == (0, head + 12, 1)
    assert run(engine, behind(head, document(1))) == (0, 12, 1)
    assert run(engine, behind(head, document(1), document(0), question=11)) == (0, 13, 1)


def test_a_head_is_not_read_from_blocks_that_were_reused(model_dir: Path) -> None:
    """What the prompt that computed it left is gone: it is computed again, with the next prompt."""
    engine = engine_with(model_dir, document(0), document(1))
    run(engine, behind(24, document(0)))
    pool = engine.scheduler.spans.residency.pool
    (where,) = engine.scheduler.spans.copies.heads.values()
    pool.evict_blocks({where.blocks[0].block_id})
    assert run(engine, behind(24, document(1))) == (0, 24 % BLOCK + 12, 1)


def test_prompts_that_come_together_compute_the_end_of_their_head_each(model_dir: Path) -> None:
    """What fills no block is less than a step of its own would cost."""
    engine = engine_with(model_dir, *(document(n) for n in range(6)))
    run(engine, behind(24, document(0)))
    engine.scheduler.spans.copies.heads.clear()
    together = [behind(24, document(n), document(n + 1), question=20) for n in range(1, 5)]
    assert run(engine, *together) == (0, 4 * (24 % BLOCK + 22), 1)


@pytest.mark.parametrize("lag", [0, 1])
def test_prompts_that_come_together_share_a_long_head(model_dir: Path, lag: int) -> None:
    """One of them computes it, and the others wait for that; while it runs, they compute what fills no block."""
    engine = engine_with(model_dir, *(document(n) for n in range(6)), lag=lag)
    together = [behind(90, document(n), document(n + 1), question=20) for n in range(5)]
    assert run(engine, *together) == (0, 90 + 5 * 22 + 4 * lag * (90 % BLOCK), 2)


def test_with_other_sources_missing_a_head_is_made_beside_them(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    assert run(engine, behind(40, document(0))) == (2, 40 + 3 + 40 + 12, 2)


def test_a_head_that_is_cached_is_waited_for_by_nobody(model_dir: Path) -> None:
    """Spans that end before the first full block behind the head are under way; other prompts have the head too."""
    engine = engine_with(model_dir, document(0), document(1), document(0, 5))
    run(engine, behind(36, document(0)))
    small = behind(36, document(0, 5), question=20)
    assert small.spans[-1].end // BLOCK == 36 // BLOCK
    engine.scheduler.spans.copies.heads.clear()  # so that each computes the end of its head
    together = [small, behind(36, document(1), question=20), behind(36, document(1), document(0), question=20)]
    assert run(engine, *together) == (0, 3 * (36 % BLOCK + 22), 1)


def test_who_waits_for_a_head_has_its_documents_made_meanwhile(model_dir: Path) -> None:
    engine = engine_with(model_dir, document(0))
    together = [behind(90, document(0), question=20), behind(90, document(1), question=20)]
    assert run(engine, *together) == (1, 90 + 22 + 43 + 22, 2)


@pytest.mark.parametrize("offset", [0, 11])
def test_a_head_is_not_read_where_another_prompt_moved_it(model_dir: Path, offset: int) -> None:
    """It was a span too, and was taken over. Off its place it takes a block more than there may be, and nobody takes a
    head over; and each time it came back from there, its keys would have been rotated once more."""
    engine = start(model_dir, 10, max_model_len=128)
    text, other = tuple(range(300, 340)), document(9, 24)
    engine.send(SpanPrompt(text), keep=True)
    engine.finish()
    ids = (*range(800, 811 + offset), *text)
    at = 11 + offset
    engine.send(SpanPrompt((*ids, *range(40, 96 - offset), *ANSWER), (Span(at, at + 40, NO_ANCHOR),)))
    engine.finish()
    assert engine.scheduler.spans.copies.relocated
    last = engine.send(SpanPrompt((*text, *other, *range(40, 55), *ANSWER), (Span(40, 64, SpanPrompt(HEADER)),)))
    engine.finish(400)
    engine.check()
    assert engine.sent[last].finished
    assert all(where.rotations == 0 for where in engine.scheduler.spans.copies.heads.values())


def test_no_more_heads_are_remembered_than_there_are_blocks(model_dir: Path) -> None:
    engine = engine_with(model_dir, document(0))
    for number in range(130):
        engine.send(SpanPrompt((900 + number, *behind(24, document(0)).token_ids[1:]), behind(24, document(0)).spans))
        engine.finish()
    engine.check()
    assert len(engine.scheduler.spans.copies.heads) == 120
