"""Who gets memory, and in which order: rules of the queue, one a test, on the real scheduler without a model."""

from __future__ import annotations

import random
from itertools import cycle, permutations
from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import document, plain, prompt, start

pytestmark = pytest.mark.vllm


def waiting(engine: Any) -> list[str]:
    """Names in the queue, in its order."""
    return [request.request_id for request in engine.scheduler.waiting]


def evict(engine: Any, name: str, number: int) -> None:
    """Take a source of a request out of the pool, as pressure does."""
    spans = engine.scheduler.spans
    found = spans.residency.cached(spans.known[name].sources[number].keys.full)
    assert found
    engine.scheduler.kv_cache_manager.block_pool.evict_blocks({block.block_id for block in found})


def test_plain_requests_do_not_starve_a_span_request(model_dir: Path) -> None:
    """A document many times over: its prompt needs more than the source's own blocks, and short requests that keep
    coming take each block that is freed, the source's too. After some steps they wait."""
    engine = start(model_dir, 31, max_model_len=256, max_num_seqs=32)
    for number in range(16):
        engine.send(plain(number, 20), 10 + number)
    engine.step()
    name = engine.send(prompt(*[document(0, 30)] * 6))
    for number in range(16, 500):
        if len(engine.scheduler.waiting) < 4:
            engine.send(plain(number, 20), 10 + number % 7)
        engine.step()
        if engine.sent[name].finished:
            break
    assert engine.sent[name].finished
    engine.finish()
    engine.check()


def test_what_is_there_is_held_back_while_memory_is_short(model_dir: Path) -> None:
    """Short requests come and go while the first span request waits for one that runs; its sources stay."""
    engine = start(model_dir, 31, max_model_len=400)
    engine.send(plain(0, 20 * 16 - 15), 14)
    engine.step()
    name = engine.send(prompt(*[document(0, 30)] * 6))
    for number in range(1, 40):
        engine.send(plain(number, 12), 3)
        engine.step()
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"] * 6
    assert engine.scheduler.spans.counters["sources"] == 2


def test_a_missing_source_does_not_push_out_one_that_is_there(model_dir: Path) -> None:
    """The first span request waits for memory rather than lose what it has."""
    engine = start(model_dir, 14, max_model_len=208)
    engine.send(prompt(document(0)))
    engine.finish()
    engine.send(plain(1, 8 * 16 - 10), 8)
    engine.step()
    before = engine.scheduler.spans.counters["sources"]
    name = engine.send(prompt(document(0), document(1)))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["hit", "new"]
    assert engine.scheduler.spans.counters["sources"] - before == 1


def test_nothing_is_held_back_from_a_plain_request_that_came_first(model_dir: Path) -> None:
    """It needs the memory of a source behind it; held back, both would wait until patience ends."""
    engine = start(model_dir, 14, max_model_len=208)
    engine.send(prompt(document(0)))
    engine.finish()
    engine.send(plain(1, 8 * 16 - 10), 8)
    engine.step()
    engine.send(plain(2, 12 * 16 - 10), 8)
    engine.send(prompt(document(0), document(1)))
    engine.finish(60)
    engine.check()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_source_under_way_is_pulled_before_the_first_that_waits_for_it(model_dir: Path, policy: str) -> None:
    """It stood behind a plain request, for which the memory is missing that the first one holds back."""
    engine = start(model_dir, 20, max_model_len=304, scheduling_policy=policy)
    later = {"priority": 1} if policy == "priority" else {}
    name = engine.send(prompt(document(0), document(1)), 40)
    while not engine.sent[name].tokens:
        engine.step()
    evict(engine, name, 2)
    engine.send(plain(1, 17 * 16 - 10), 8, **later)
    engine.send(prompt(document(1), document(2)), **later)
    engine.step()
    # Preempted, it comes first again, and what it was assembled of is gone in part.
    pool = engine.scheduler.kv_cache_manager.block_pool
    held = engine.scheduler.kv_cache_manager.get_blocks(name).blocks[0]
    pool.evict_blocks({block.block_id for block in held if block.block_hash is not None})
    engine.preempt(1)
    engine.finish(90)
    engine.check()


def test_a_source_that_is_lost_before_it_is_read_is_made_again(model_dir: Path) -> None:
    engine = start(model_dir, 60)
    name = engine.send(prompt(document(0)))
    while engine.scheduler.spans.counters["sources"] == 0 or engine.scheduler.running:
        engine.step()
    assert engine.scheduler.spans.held
    engine.reset(running=False)
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"]
    assert engine.scheduler.spans.counters["sources"] == 4


def test_only_the_first_in_the_queue_has_a_lost_source_made_again(model_dir: Path) -> None:
    """Others would make theirs again and again as long as those in front of them push it out."""
    engine = start(model_dir, 60, max_num_batched_tokens=64, long_prefill_token_threshold=7)
    counters = engine.scheduler.spans.counters
    first, second = engine.send(prompt(document(0, 60))), engine.send(prompt(document(5, 14)))
    sources = engine.scheduler.spans.by_source
    while not counters["sources"] or engine.scheduler.spans.known[second].sources[1].keys.key in sources:
        engine.step()
    assert {first, second} == engine.scheduler.spans.held.keys()
    made = counters["sources"]
    evict(engine, second, 1)
    while first in engine.scheduler.spans.held:
        assert counters["sources"] == made
        engine.step()
    engine.finish()
    engine.check()
    assert counters["sources"] == made + 1


def test_running_requests_are_not_preempted_for_what_is_held_back(model_dir: Path) -> None:
    """A source waits for memory, and what its reader has already is held back; who runs may still grow into it."""
    engine = start(model_dir, 14, max_model_len=208)
    engine.send(prompt(document(0)))
    engine.finish()
    runs = engine.send(plain(1, 7 * 16 - 4), 90)
    engine.step()
    waits = engine.send(prompt(document(0), document(1, 60)))
    while not engine.sent[runs].finished:
        assert waits in engine.scheduler.spans.held
        engine.step()
    assert engine.scheduler.spans.counters["preemptions"] == 0
    engine.finish()
    engine.check()


def test_seats_are_given_in_the_order_of_the_queue(model_dir: Path) -> None:
    """A request that holds blocks goes first with vLLM, so nobody gets blocks whose turn has not come."""
    engine = start(model_dir, 60, max_num_seqs=2)
    engine.send(prompt(document(0)))
    engine.finish()
    first = {engine.send(plain(number, 20), 5) for number in range(2)}
    engine.send(prompt(document(0), question=20))
    engine.step()
    assert {request.request_id for request in engine.scheduler.running} == first
    engine.finish()
    engine.check()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_sources_stand_where_their_reader_stands(model_dir: Path, policy: str) -> None:
    engine = start(model_dir, 60, scheduling_policy=policy)
    priorities = (1, 2, 3) if policy == "priority" else (0, 0, 0)
    before = engine.send(plain(0, 30), priority=priorities[0])
    name = engine.send(prompt(document(0)), priority=priorities[1])
    behind = engine.send(plain(1, 30), priority=priorities[2])
    engine.scheduler.spans.resolve()
    sources = sorted(engine.scheduler.spans.internal)
    assert len(sources) == 2
    assert sorted(waiting(engine)[1:3]) == sources
    assert [waiting(engine)[0], *waiting(engine)[3:]] == [before, name, behind]
    engine.finish()
    engine.check()


def test_families_take_seats_before_they_run(model_dir: Path) -> None:
    """Ranges and parent hold blocks and wait; a second family would hold as many, and neither could be preempted."""
    engine = start(model_dir, 120, max_num_seqs=3, max_num_batched_tokens=5)
    for number in range(2):
        engine.send(prompt(document(number), document(number + 1)))
        engine.finish()
    engine.send(prompt(document(1), document(0), repair=9))
    engine.step()
    name = engine.send(prompt(document(2), document(1), repair=9))
    engine.step()
    assert name in engine.scheduler.spans.held
    engine.finish()
    engine.check()


def test_nobody_overtakes_the_first_that_waits_for_memory(model_dir: Path) -> None:
    """A smaller prompt that would fit waits behind a larger one, or the larger one might wait for ever."""
    engine = start(model_dir, 31, max_model_len=400)
    for documents in ((document(0, 30),), (document(1, 20),)):
        engine.send(prompt(*documents))
        engine.finish()
    runs = engine.send(plain(1, 18 * 16 - 10), 9)
    while not engine.sent[runs].tokens:
        engine.step()
    large, small = engine.send(prompt(*[document(0, 30)] * 6)), engine.send(prompt(document(1, 20), question=12))
    while not engine.sent[large].tokens:
        assert not engine.sent[small].tokens
        engine.step()
    engine.finish()
    engine.check()


def test_the_whole_prompt_has_its_blocks_when_it_is_resolved(model_dir: Path) -> None:
    """Two parents that hold a part of theirs are not preempted, and would block each other for ever."""
    engine = start(model_dir, 20, max_model_len=256, max_num_batched_tokens=64)
    for number in range(2):
        engine.send(prompt(document(number)))
        engine.finish()
    names = [engine.send(prompt(document(number), question=158)) for number in range(2)]
    engine.scheduler.spans.resolve()
    held = [len(engine.scheduler.kv_cache_manager.get_blocks(name).blocks[0]) for name in names]
    assert held == [13, 0]
    engine.finish()
    engine.check()


def test_prompts_whose_sources_are_there_do_not_starve_one_that_lacks_some(model_dir: Path) -> None:
    """Each of them fits into what the first one's source waits for; after some steps they wait as well."""
    engine = start(model_dir, 31, max_model_len=256, max_num_seqs=32)
    documents = [document(number, 13) for number in range(3)]
    engine.send(prompt(*documents))
    engine.finish()
    # 50 tokens, and an answer that fits into their last block: one ends each step, and another one takes its place.
    others = cycle(prompt(*pair, question=14) for pair in permutations(documents, 2))
    for _ in range(14):
        engine.send(next(others), 14)
        engine.step()
    name = engine.send(prompt(document(3, 150)))
    for _ in range(500):
        while len(engine.scheduler.waiting) < 8:
            engine.send(next(others), 14)
        engine.step()
        if engine.sent[name].finished:
            break
    assert engine.sent[name].finished
    assert engine.scheduler.spans.counters["preemptions"] == 0
    engine.finish()
    engine.check()


@pytest.mark.parametrize("seed", [0, 1])
def test_preempted_prompts_do_not_starve_one_that_lacks_a_source(model_dir: Path, seed: int) -> None:
    """One that is preempted stands before it again and again."""
    draw = random.Random(seed)
    engine = start(model_dir, 31, max_model_len=256, max_num_seqs=32)
    engine.send(prompt(document(0)))
    engine.finish()

    def step() -> None:
        if len(engine.scheduler.waiting) < 4:
            engine.send(prompt(document(0), question=draw.randint(12, 60)), draw.randint(10, 60))
        engine.step()

    for _ in range(25):
        step()
    name = engine.send(prompt(document(3, 150)))
    for _ in range(400):
        step()
        if engine.sent[name].finished:
            break
    assert engine.sent[name].finished
    assert engine.scheduler.spans.counters["preemptions"] > 10
    engine.finish()
    engine.check()


def waits_for_memory(model_dir: Path) -> tuple[Any, str]:
    """An engine whose first span request holds its sources back, for want of blocks of its own."""
    engine = start(model_dir, 31, max_model_len=400, scheduling_policy="priority")
    engine.send(prompt(document(0, 30)))
    engine.finish()
    runs = engine.send(plain(1, 18 * 16 - 10), 9)
    while not engine.sent[runs].tokens:
        engine.step()
    name = engine.send(prompt(*[document(0, 30)] * 6), priority=1)
    engine.step()
    assert engine.scheduler.spans.reserve.blocks
    return engine, name


def test_a_source_that_another_one_waits_for_is_taken_over_last(model_dir: Path) -> None:
    engine = start(model_dir, 14, max_model_len=208)
    name = engine.send(prompt(document(0), document(1)))
    engine.send(prompt(document(0), question=20))
    engine.finish()
    engine.check()
    assert ["in place" in why for why in engine.whys(name)] == [False, True]
    assert engine.scheduler.spans.counters["sources"] == 3


def test_as_few_sources_are_taken_over_as_can_be(model_dir: Path) -> None:
    """Two blocks are missing, and the first document has one."""
    engine = start(model_dir, 15, max_model_len=208)
    name = engine.send(prompt(document(0, 13), document(1), document(2)))
    engine.finish()
    engine.check()
    assert ["in place" in why for why in engine.whys(name)] == [False, True, False]


def test_patience_is_for_one_request(model_dir: Path) -> None:
    """Another one that comes first has not waited yet, and nobody waits behind it."""
    engine, name = waits_for_memory(model_dir)
    reserve, known = engine.scheduler.spans.reserve, engine.scheduler.spans.known
    known[name].num_starved = 1000
    engine.scheduler.spans.resolve()
    assert engine.scheduler.connector.closed
    other = engine.send(prompt(*[document(0, 30)] * 6, question=11))
    engine.scheduler.spans.resolve()
    assert (reserve.owner, known[other].num_starved) == (other, 1)
    assert known[name].num_starved == 1001
    assert not engine.scheduler.connector.closed
    engine.finish()
    engine.check()


def test_nothing_is_held_back_for_one_that_is_gone(model_dir: Path) -> None:
    engine, name = waits_for_memory(model_dir)
    engine.abort(name)
    assert engine.scheduler.audit()["pins"] == 0
    engine.finish()
    engine.check()


def test_nothing_is_held_back_from_a_reset(model_dir: Path) -> None:
    """vLLM resets a cache that nobody holds a block of."""
    engine, _ = waits_for_memory(model_dir)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.finish()
    engine.check()
