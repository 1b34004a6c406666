"""Memory beside requests without spans, as vLLM gives it: who runs comes first, then who came first.

On the real scheduler without a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import BLOCK, document, plain, prompt, start

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("options", [{}, {"scheduling_policy": "priority"}, {"watermark": 0.1}], ids=str)
def test_hits_do_not_starve_a_plain_request_that_came_first(model_dir: Path, options: dict[str, Any]) -> None:
    """It needs more memory than one answer gives back, and prompts whose documents are there keep coming behind it."""
    engine = start(model_dir, 31, max_model_len=400, **options)
    later = {"priority": 5} if "scheduling_policy" in options else {}
    for number in range(7):
        engine.send(prompt(document(0)), 4 + 3 * number, **later)
        engine.step()
    name = engine.send(plain(1, 20 * 16 - 10), 4)
    for number in range(300):
        if len(engine.scheduler.waiting) < 4:
            engine.send(prompt(document(0)), 10 + number % 7, **later)
        engine.step()
        if engine.sent[name].finished:
            break
    assert engine.sent[name].finished
    engine.finish()
    engine.check()


def test_a_hit_does_not_pass_a_plain_request_that_is_longer_than_a_step(model_dir: Path) -> None:
    """It would begin with two blocks, but vLLM wants all of them to be there."""
    engine = start(model_dir, 31, max_model_len=400, max_num_batched_tokens=32)
    engine.send(prompt(document(0)))
    engine.finish()
    running = engine.send(plain(1, 190), 20)
    while not engine.sent[running].tokens:
        engine.step()
    first, hit = engine.send(plain(2, 20 * BLOCK - 10), 2), engine.send(prompt(document(0), question=20), 2)
    while not engine.sent[hit].tokens:
        engine.step()
    request = engine.scheduler.requests.get(first)
    assert request is None or request.num_computed_tokens > 0
    engine.finish()
    engine.check()


@pytest.mark.parametrize("length", range(142, 149))
def test_who_runs_gets_its_memory_before_a_hit_that_waits(model_dir: Path, length: int) -> None:
    """The last blocks are not given to a prompt whose document is there, to be missing in the same step for who runs.

    Of 14, it wants 5, in place of the document, and who runs has 9, or is about to want the tenth.
    """
    engine = start(model_dir, 15, max_model_len=224)
    engine.send(prompt(document(0)))
    engine.finish()
    running = engine.send(plain(1, length - 2), 20)
    while len(engine.sent[running].tokens) < 2:
        engine.step()
    engine.send(prompt(document(0), question=20), 1)
    engine.step()
    assert engine.scheduler.spans.counters["preemptions"] == 0
    engine.finish()
    engine.check()


@pytest.mark.parametrize("watermark", [0.1, 0.4])
def test_a_watermark_is_kept_while_others_run(model_dir: Path, watermark: float) -> None:
    """And not where nobody does: a prompt that fits into the pool is served all the same."""
    engine = start(model_dir, 41, max_model_len=600, watermark=watermark)
    name = engine.send(prompt(*[document(number) for number in range(5)]))
    engine.finish(300)
    engine.check()
    assert engine.statuses(name) == ["new"] * 5
    running = engine.send(plain(1, 60), 200)
    engine.step()
    for number in range(4):
        engine.send(prompt(document(0), document(1), question=10 + number), 3)
    while not engine.sent[running].finished:
        engine.step()
        free = engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        assert free >= int(watermark * 41) - 1
    engine.finish(300)
    engine.check()
