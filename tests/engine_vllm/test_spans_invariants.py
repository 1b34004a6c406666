"""What the span scheduler must never do, one invariant a test, on the real scheduler without a model."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import document, other_kv, plain, prompt, start

pytestmark = pytest.mark.vllm


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


def test_an_aborted_request_leaves_nothing_that_was_spawned_for_it(model_dir: Path) -> None:
    """Said at once, though it is forgotten with the next step, whose output names it."""
    engine = start(model_dir, 60, max_num_batched_tokens=16)
    name = engine.send(prompt(document(0), document(1)))
    engine.step()
    assert engine.scheduler.audit()["internal"] == 2
    engine.abort(name)
    found = engine.scheduler.audit()
    assert not any(found[kind] for kind in ("requests", "internal", "held", "families", "pins"))
    assert found["problems"] == []


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


def test_what_is_moved_counts_as_cached(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    name = engine.send(prompt(document(0), repair=3))
    engine.finish()
    stats = engine.sent[name].prefill
    # All but what is repaired, the question and the last header.
    assert (stats.num_prompt_tokens, stats.num_external_cached_tokens) == (60, 60 - 3 - 12)


@pytest.mark.parametrize("kinds", [(), ("sliding window",)])
def test_blocks_that_nobody_will_write_are_not_found(model_dir: Path, kinds: tuple[str, ...]) -> None:
    """A request is preempted in the step that scheduled it: its blocks of each kind have hashes, and no KV."""
    engine = start(model_dir, 60, others=[other_kv(kind) for kind in kinds])
    name = engine.send(plain(1, 50))
    scheduler = engine.scheduler
    scheduler.schedule()
    request = scheduler.requests[name]
    hashes = list(request.block_hashes)
    assert len(hashes) == 3

    def found(kind: int) -> list[Any]:
        pool = scheduler.kv_cache_manager.block_pool
        return [block for h in hashes for block in pool.get_cached_block(h, [kind]) or ()]

    assert len(found(0)) == 3
    assert all(found(1 + number) for number in range(len(kinds)))
    # As vLLM has it when a request of higher priority takes the memory: what was computed before this step.
    request.num_computed_tokens = 0
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    assert not any(found(kind) for kind in range(1 + len(kinds)))


def test_a_step_with_moves_says_so(model_dir: Path) -> None:
    """A worker that does not know of loads may run moves beside the forward pass that reads them."""
    engine = start(model_dir, 60)
    steps, run = [], engine.worker.run

    def watched(output: Any) -> Any:
        steps.append((bool(output.kv_connector_metadata.moves), output.has_sync_kv_loads))
        return run(output)

    engine.worker.run = watched
    engine.send(prompt(document(0)))
    engine.finish()
    assert steps[:2] == [(False, False), (True, True)]
    assert not any(has_moves or has_loads for has_moves, has_loads in steps[2:])


def test_nobody_hears_of_internal_requests(model_dir: Path) -> None:
    """Neither their outputs nor that they ended, which vLLM tells clients apart from outputs."""
    engine = start(model_dir, 60)
    engine.scheduler.finished_req_ids_dict = defaultdict(set)
    heard, update = set(), engine.scheduler.update_from_output

    def watched(*step: Any) -> Any:
        outputs = update(*step)
        for client in outputs.values():
            heard.update(output.request_id for output in client.outputs)
            heard.update(client.finished_requests or ())
        return outputs

    engine.scheduler.update_from_output = watched
    name = engine.send(prompt(document(0), repair=3))
    engine.finish()
    engine.check()
    assert heard == {name}


def test_a_name_may_come_again(model_dir: Path) -> None:
    """At once, after an abort: what is forgotten is the old request. Once all has ended, nothing is known any more."""
    engine = start(model_dir, 60)
    name = engine.send(prompt(document(0), repair=3))
    engine.step()
    engine.abort(name)
    engine._names = itertools.count()
    assert engine.send(prompt(document(0), repair=3), 3) == name
    engine.step()
    assert engine.scheduler.spans.known.keys() == {name}
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["hit"]
    assert not engine.scheduler.spans.known
    assert not engine.scheduler.spans.internal


def test_no_source_outlives_a_reset(model_dir: Path) -> None:
    """The weights may have changed. Of a source that fills no block the pool itself knows nothing."""
    engine = start(model_dir, 60)
    engine.send(prompt(document(0, 9)))
    engine.finish()
    engine.reset(running=False)
    name = engine.send(prompt(document(0, 9), question=12))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["evicted"]


def test_an_abort_ends_what_was_spawned_for_it_alone(model_dir: Path) -> None:
    """What somebody else waits for goes on, and vLLM is told of the caller's requests only."""
    from spanflow.engine.vllm.contract import RequestStatus

    engine = start(model_dir, 60, max_num_batched_tokens=16)
    scheduler = engine.scheduler
    first, second = engine.send(prompt(document(0), document(1))), engine.send(prompt(document(1)))
    engine.step()
    assert scheduler.spans.counters["sources"] == 3
    finished = scheduler.finish_requests([first], RequestStatus.FINISHED_ABORTED)
    assert [request.request_id for request in finished] == [first]
    # The head is there; the document is under way, and the second one waits for it.
    assert scheduler.requests.keys() == {"spanflow-source-3", second}
    engine.sent.pop(first)
    engine.finish()
    engine.check()
    assert scheduler.spans.counters["sources"] == 3
    assert engine.statuses(second) == ["new"]
