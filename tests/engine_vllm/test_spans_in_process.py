"""Aborts, preemptions and resets in each phase, in an engine whose core is stepped by hand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from phases import EVENTS_IN_PHASES
from span_cases import NAMED_CASES, RESET, cancelled, check_budgets, disturbed_judge, paused, result, start, until
from vllm_rig import Judge, Rig, generate_candidates

from spanflow.engine.protocol import Lease
from spanflow.errors import QueryError
from spanflow.lowering.prompt import SpanPrompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module", params=["sync", "async"])
def rig(start_rig: Any, short_model_dir: Path, request: pytest.FixtureRequest) -> Rig:
    """In-process; with vLLM's asynchronous scheduling too, which its CPU platform switches off by itself."""
    rig: Rig = start_rig(
        short_model_dir,
        in_process=True,
        max_model_len=2048,
        kv_cache_gib=0.06,
        async_scheduling=request.param == "async",
    )
    core = rig.engine._backend.engine.engine_core.engine_core
    assert (core.batch_queue is not None) == (request.param == "async")
    return rig


@pytest.fixture(scope="module")
def judge(short_judge: Judge) -> Judge:
    return short_judge


@pytest.mark.parametrize("case", [*NAMED_CASES, RESET])
def test_the_named_cases(rig: Rig, judge: Judge, case: Callable[[Rig, Judge], None]) -> None:
    rig.reset()
    case(rig, judge)


@pytest.mark.parametrize(("event", "phase"), EVENTS_IN_PHASES)
def test_an_event_in_each_phase_of_a_judge(rig: Rig, judge: Judge, event: str, phase: str) -> None:
    disturbed_judge(rig, judge, event, phase)


@pytest.mark.parametrize("budget", [64, 4096])
@pytest.mark.parametrize("threshold", [0, 40])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_budgets_thresholds_and_priorities(rig: Rig, judge: Judge, policy: str, threshold: int, budget: int) -> None:
    """Chunked prefill cuts spans, ranges exceed the step's budget, priorities are reversed: the same answers."""
    rig.reset()
    prompts = [
        rig.prompt([rig.document(n), rig.document(n + 1), rig.document(n + 2)], f"Q{n}?", repair=30 + n)
        for n in range(4)
    ]
    with settings(rig, policy, threshold, budget):

        async def together() -> list[Any]:
            return list(await asyncio.gather(*(rig.run(p, 2, priority=9 - n) for n, p in enumerate(prompts))))

        answers = rig.wait(together())
        judge.check(*answers, *rig.ask(*prompts[::-1]))


class settings:  # noqa: N801
    """The scheduler's settings for a while; only while it is idle."""

    def __init__(self, rig: Rig, policy: str, threshold: int, budget: int) -> None:
        self.scheduler, self.wanted = rig.scheduler, (policy, threshold, budget)

    def __enter__(self) -> None:
        self.before = ("fcfs", 0, self.scheduler.max_num_scheduled_tokens)
        self._set(*self.wanted)

    def __exit__(self, *_: object) -> None:
        self._set(*self.before)

    def _set(self, policy: str, threshold: int, budget: int) -> None:
        from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue

        scheduler = self.scheduler
        assert not scheduler.requests
        scheduler.policy = SchedulingPolicy(policy)
        scheduler.waiting = create_request_queue(scheduler.policy)
        scheduler.kv_holding_waiting = create_request_queue(scheduler.policy)
        scheduler.scheduler_config.long_prefill_token_threshold = threshold
        scheduler.max_num_scheduled_tokens = budget


def test_budgets_that_cut_documents(rig: Rig, judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, own_budget, num_tokens = rig.scheduler, rig.scheduler.max_num_scheduled_tokens, [0]
    schedule = scheduler.schedule

    def watched(*args: Any) -> Any:
        output = schedule(*args)
        num_tokens.append(output.total_num_scheduled_tokens)
        return output

    def told(budget: int | None) -> int:
        scheduler.max_num_scheduled_tokens = budget or own_budget
        most = max(num_tokens)
        num_tokens[:] = [0]
        return most

    monkeypatch.setattr(scheduler, "schedule", watched)
    try:
        check_budgets(rig, judge, told)
    finally:
        told(None)


def test_ranges_above_the_token_budget_finish(rig: Rig, judge: Judge) -> None:
    """All tokens but one of each span are repaired, with a budget of 64 tokens a step."""
    documents = [rig.document(n, 4) for n in range(3)]
    prompt = rig.prompt(documents, repair=min(map(len, documents)) - 1)
    with settings(rig, "fcfs", 0, 64):
        judge.check(rig.one(prompt))


def test_few_seats(rig: Rig, judge: Judge) -> None:
    """A family larger than the number of sequences that may run at once finishes all the same."""
    scheduler = rig.scheduler
    prompts = [rig.prompt([rig.document(n + k) for k in range(4)], repair=3) for n in range(3)]
    before, scheduler.max_num_active_reqs = scheduler.max_num_active_reqs, 2
    try:
        judge.check(*rig.ask(*prompts))
    finally:
        scheduler.max_num_active_reqs = before


def test_a_step_runs_no_member_before_those_in_front(rig: Rig) -> None:
    """The check itself: a family whose parent jumps its ranges is found out, not answered wrongly."""
    from spanflow.engine.vllm.state import Family

    families = rig.scheduler.spans.family
    scheduler = rig.scheduler

    class Child:
        num_computed_tokens = 3

    class Output:
        num_scheduled_tokens = {"parent": 1}  # noqa: RUF012

    scheduler.requests["member"] = Child()
    families.waiting["parent"] = Family(Child(), {"member": (3, 9)})
    try:
        with pytest.raises(AssertionError, match="request parent ran before its ranges"):
            families.scheduled(Output())
    finally:
        del scheduler.requests["member"], families.waiting["parent"]


def test_the_audit_finds_a_lost_reference(rig: Rig) -> None:
    """The check that guards all others fails when it must."""
    pool = rig.scheduler.kv_cache_manager.block_pool
    with paused(rig):
        block = pool.get_new_blocks(1)[0]
        assert any(f"block {block.block_id} has 1 references" in p for p in rig.scheduler.audit()["problems"])
        pool.free_blocks([block])
        assert rig.scheduler.audit()["problems"] == []


@pytest.mark.parametrize("is_added", [False, True])
def test_a_caller_cancelled_while_a_step_runs_leaves_nothing_behind(rig: Rig, is_added: bool) -> None:
    """Before its request is handed over, which waits for the step, and after."""
    rig.reset()
    with paused(rig) as backend:
        with nullcontext() if is_added else backend.lock:  # as a step holds it
            task = start(rig, rig.prompt([rig.document(3)]), f"cancelled-{is_added}", max_tokens=100)
            rig.wait(until(lambda: is_added == bool(backend.queues)))
            rig.wait(asyncio.sleep(0.05))
            ended = asyncio.run_coroutine_threadsafe(cancelled(task), rig.loop)
            rig.wait(asyncio.sleep(0.05))
        ended.result(20)
        rig.wait(until(lambda: not backend.queues))
        assert not any("cancelled" in name for name in rig.scheduler.requests)
    rig.assert_idle()


def test_a_lease_ends_with_its_consumer_by_time_and_by_release(rig: Rig) -> None:
    rig.reset()
    inner = generate_candidates(rig, 2, max_tokens=13, lease=Lease(consumers=2))
    assert rig.audit()["leases"] == 2
    rig.one(rig.judge(inner))
    assert rig.audit()["leases"] == 2
    rig.one(rig.judge(inner, "And which is the worst?"))
    assert rig.audit()["leases"] == 0
    generate_candidates(rig, 1, max_tokens=13, lease=Lease(seconds=0.01))
    rig.one(rig.chat("Hello?"))
    rig.one(rig.chat("Hello again?"))
    assert rig.audit()["leases"] == 0
    generate_candidates(rig, 1, max_tokens=13, name="kept")
    assert rig.audit()["leases"] == 1
    rig.wait(rig.engine.release(("kept", "unknown")))
    assert rig.audit()["leases"] == 0


def test_an_evicted_source_among_others(rig: Rig, judge: Judge) -> None:
    """d1 goes between its use and the next: the same answer, the report says evicted, d2 still hits."""
    rig.reset()
    one, two = rig.document(0, 6), rig.document(1, 6)
    prompt = rig.prompt([one, two], repair=4)
    judge.check(rig.one(prompt))
    scheduler = rig.scheduler
    keys = scheduler.spans.hashing.source_keys(_tenant(), SpanPrompt(rig.header + one))
    blocks = scheduler.spans.residency.cached(keys.full)
    assert blocks
    scheduler.kv_cache_manager.block_pool.evict_blocks({blocks[0].block_id})
    answer = rig.one(rig.prompt([two, one], repair=4))
    assert answer.statuses == ["hit", "evicted"]
    judge.check(answer)


def _tenant() -> Any:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return Request("tenant", [0], SamplingParams(max_tokens=1), None)


def test_skip_reading_prefix_cache_and_prompt_logprobs_run_exactly(rig: Rig, judge: Judge) -> None:
    """They need every token computed: full attention, and a report that says so."""
    from spanflow.engine.vllm import backend as module

    plain = module.sampling_params
    prompt = rig.prompt([rig.document(5), rig.document(6)], repair=2)
    skip = {"skip_reading_prefix_cache": True}
    for wanted, reason in (
        (skip, "does not read the prefix cache"),
        (skip | {"prompt_logprobs": 1}, "every token computed"),  # vLLM sets the one with the other
    ):

        def changed(*given: Any, wanted: Any = wanted) -> Any:
            params = plain(*given)
            for name, value in wanted.items():
                setattr(params, name, value)
            return params

        module.sampling_params = changed
        try:
            answer = rig.one(prompt)
        finally:
            module.sampling_params = plain
        assert answer.statuses == ["unsupported"] * 2
        assert reason in answer.spans[0].why
        assert judge.distance(answer, SpanPrompt(prompt.token_ids)) < 1e-4


#: Whatever the model prefers, its answer ends: there is no number to go on with, and no place for white space.
_SCHEMA = {"type": "string", "enum": ["1871", "1934"]}


@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")  # vLLM's to mend
@pytest.mark.parametrize("repair", [0, 6])
def test_a_grammar_that_fails_to_compile_leaves_nothing_behind(rig: Rig, judge: Judge, repair: int) -> None:
    """It fails at once, or once the prompt is assembled: that request ends with an error, and the next is served."""
    rig.reset()
    manager = rig.scheduler.structured_output_manager
    prompt = rig.prompt([rig.document(1), rig.document(2)], repair=repair)
    schema = json.dumps(_SCHEMA)
    warm = rig.one(prompt, max_tokens=40, schema=schema)
    assert json.loads(warm.text) in _SCHEMA["enum"]
    assert warm.last.finish_reason == "stop"
    judge_spans = rig.one(prompt)
    judge.check(judge_spans)
    for is_late in (False, True):
        compiling = threading.Event()

        def fail(*args: Any, is_late: bool = is_late, compiling: threading.Event = compiling, **kwargs: Any) -> Any:
            if is_late and not compiling.wait(20):
                raise TimeoutError("the prompt was never assembled")
            raise RuntimeError("no such grammar")

        compile_grammar, manager.backend.compile_grammar = manager.backend.compile_grammar, fail
        try:
            task = start(rig, prompt, f"late-{is_late}-{repair}", schema=schema)
            if is_late:
                rig.wait(until(lambda: bool(rig.scheduler.kv_holding_waiting)))
            compiling.set()
            answer = rig.wait(result(task))
        finally:
            manager.backend.compile_grammar = compile_grammar
        assert answer.last.finish_reason == "error"
        assert answer.token_ids == ()
        rig.assert_idle()
        assert rig.audit()["leases"] == 0
    with pytest.raises(QueryError, match=r"vLLM refused .*no such type"):
        rig.one(prompt, schema=json.dumps({"type": "no such type"}))
    assert rig.engine._backend.queues == {}
    again = rig.one(prompt, max_tokens=40, schema=schema)
    assert again.statuses == ["hit", "hit"]
    assert again.token_ids == warm.token_ids
