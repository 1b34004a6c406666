"""A parent and the ranges that are computed in context for it, on the real scheduler without a model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from symbolic_prompts import document, plain, prompt, start

pytestmark = pytest.mark.vllm


def under_way(model_dir: Path) -> tuple[Any, str]:
    """An engine with so small a budget that a family takes several steps, in the middle of its ranges."""
    engine = start(model_dir, 60, max_num_seqs=4, max_num_batched_tokens=5)
    name = engine.send(prompt(document(0), document(1), document(2), repair=9))
    while not any("#" in request.request_id for request in engine.scheduler.running):
        engine.step()
    assert engine.scheduler.spans.family.waiting.keys() == {name}
    return engine, name


def members(engine: Any) -> set[str]:
    """Ranges that are queued or run."""
    return {name for name in engine.scheduler.requests if "#" in name}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("threshold", [0, 7])
@pytest.mark.parametrize("budget", [5, 16, 64])
def test_no_suffix_goes_before_a_range(model_dir: Path, policy: str, threshold: int, budget: int) -> None:
    """Four families at once, the last one of the highest priority; the scheduler's own check watches each step."""
    engine = start(
        model_dir,
        120,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        long_prefill_token_threshold=threshold,
        scheduling_policy=policy,
    )
    for number in range(4):
        documents = [document(number + at) for at in range(3)]
        engine.send(prompt(*documents, repair=9 + number), 2, priority=9 - number if policy == "priority" else 0)
    engine.finish()
    engine.check()
    assert engine.scheduler.spans.counters["ranges"] >= 12


def test_a_head_that_is_computed_with_the_ranges_goes_first(model_dir: Path) -> None:
    """Its range starts at 0: nothing of it is computed, and vLLM would queue it as a request that holds no blocks."""
    engine = start(model_dir, 60, max_num_seqs=4, max_num_batched_tokens=5)
    engine.send(prompt(document(0), document(1), repair=3))
    engine.finish()
    # The documents are there, and another head is not.
    other = prompt(document(1), document(0), repair=3)
    engine.send(plain(1, 30), 3)
    engine.send(type(other)((0, *other.token_ids[1:]), other.spans))
    engine.finish()
    engine.check()


def test_ranges_do_not_wait_behind_a_starved_request(model_dir: Path) -> None:
    """What starts at 0 has computed nothing, like a newcomer, and is none: its parent would run before it."""
    engine = start(model_dir, 14, max_model_len=208, max_num_seqs=4, scheduling_policy="priority")
    engine.send(prompt(document(0)))
    engine.finish()
    engine.send(plain(1, 5 * 16 - 10), 8)
    engine.step()
    starved = engine.send(prompt(*[document(0)] * 3), priority=1)
    engine.step()
    one = prompt(document(0), repair=3)
    assert engine.scheduler.spans.reserve.owner == starved
    engine.scheduler.spans.known[starved].num_starved = 1000
    engine.send(type(one)((0, *one.token_ids[1:]), one.spans))
    engine.scheduler.spans.resolve()
    assert engine.scheduler.connector.closed
    assert sum(not request.num_computed_tokens for request in engine.scheduler.kv_holding_waiting) == 1
    engine.finish()
    engine.check()


def test_a_head_under_an_adapter_is_materialised(model_dir: Path) -> None:
    """vLLM puts a request back whose adapter has no place in the step; a range that starts at 0 would then stand among
    newcomers, and its parent would run before it."""
    from spanflow.engine.vllm.contract import LoRARequest

    engine = start(model_dir, 60)
    engine.scheduler.lora_config = SimpleNamespace(max_loras=1)
    red, blue = LoRARequest("red", 1, "/red"), LoRARequest("blue", 2, "/blue")
    one = prompt(document(0), repair=3)
    engine.send(one, lora_request=red)
    engine.finish()
    engine.send(plain(1, 30), 9, lora_request=blue)
    engine.step()
    engine.send(type(one)((0, *one.token_ids[1:]), one.spans), lora_request=red)
    engine.finish()
    engine.check()
    assert engine.scheduler.spans.counters["sources"] == 3


@pytest.mark.parametrize("event", ["preempt", "reset", "abort"])
def test_a_family_falls_as_one(model_dir: Path, event: str) -> None:
    engine, name = under_way(model_dir)
    before = members(engine)
    match event:
        case "preempt":
            engine.preempt(1)
            engine.step()
            assert engine.scheduler.spans.counters["fallen"] == 1
        case "reset":
            engine.reset(running=True)
            assert name in engine.scheduler.spans.held
        case _:
            engine.abort(name)
            assert not engine.scheduler.requests
    assert before.isdisjoint(engine.scheduler.requests)
    engine.finish()
    engine.check()


def test_a_range_that_is_preempted_behind_its_parent_is_dropped(model_dir: Path) -> None:
    """It holds no KV that anybody reads any more; as a request of its own it would compute all of its prompt."""
    engine = start(model_dir, 60, lag=1)
    name = engine.send(prompt(document(0), document(1), repair=9))
    while not members(engine):
        engine.step()
    before = members(engine)
    assert not engine.scheduler.spans.family.waiting
    assert before < {request.request_id for request in engine.scheduler.running}
    engine.preempt(len(before) + 1)
    engine.step()
    assert before.isdisjoint(engine.scheduler.requests)
    assert name in engine.scheduler.requests
    engine.finish()
    engine.check()


def test_ranges_end_with_a_parent_that_ends_by_itself(model_dir: Path) -> None:
    """Preempted while its last token is under way, it is put together again, and then the token arrives."""
    engine = start(model_dir, 60, lag=1, max_num_seqs=4, max_num_batched_tokens=5)
    name = engine.send(prompt(document(0), document(1), repair=9))
    scheduler = engine.scheduler
    request = scheduler.requests[name]
    while request.num_computed_tokens < request.num_tokens:
        engine.step()
    assert scheduler.running == [request]
    held = scheduler.kv_cache_manager.get_blocks(name).blocks[0]
    scheduler.kv_cache_manager.block_pool.evict_blocks({block.block_id for block in held if block.block_hash})
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    engine.step()
    assert engine.sent[name].finished
    assert members(engine)
    engine.step()
    assert not scheduler.requests
    engine.finish()
    engine.check()


def test_the_check_finds_a_range_that_ran_too_early(model_dir: Path) -> None:
    engine, name = under_way(model_dir)
    family = engine.scheduler.spans.family.waiting[name]
    first, second, *_ = family.members
    engine.scheduler.requests[second].num_computed_tokens += 1
    with pytest.raises(AssertionError, match=f"range {second} ran before a range in front of it"):
        engine.scheduler.spans.family.scheduled(SimpleNamespace(num_scheduled_tokens={}))
    engine.scheduler.requests[second].num_computed_tokens -= 1
    with pytest.raises(AssertionError, match=f"request {name} ran before its ranges"):
        engine.scheduler.spans.family.scheduled(SimpleNamespace(num_scheduled_tokens={name: 1}))
    assert engine.scheduler.requests[first].num_computed_tokens < family.members[first][1]
