"""The named subset of cases that other configurations run too, and how a paused engine is driven into a phase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from vllm_rig import Answer, Judge, Rig, difference, generate_candidates

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import Span, SpanPrompt


def place_of_range(scheduler: Any) -> str:
    """Where the range lies that runs and is not done: in the head, in a span (repair), or between two spans."""
    for name, family in scheduler.spans.family.waiting.items():
        spans = scheduler.spans.known[name].prompt.spans
        for request in scheduler.running:
            low, high = family.members.get(request.request_id, (0, 0))
            at = request.num_computed_tokens
            if low < at < high:
                if at < spans[0].start:
                    return "head"
                return "repair" if any(span.start <= at < span.end for span in spans) else "gap"
    return ""


def is_in_suffix(scheduler: Any, request: Any) -> bool:
    """Whether a prompt is assembled, its ranges are computed, and what stands behind its last span is not yet."""
    state = scheduler.spans.known.get(request.request_id)
    return state is not None and state.assembly is not None and request.num_computed_tokens < request.num_prompt_tokens


#: What the scheduler must show for a phase to be reached.
PHASES: dict[str, Callable[[Any], bool]] = {
    "queued": lambda s: bool(s.spans.held),
    "materialising": lambda s: any(r.request_id.startswith("spanflow-source") for r in s.running),
    "head": lambda s: place_of_range(s) == "head",
    "repair": lambda s: place_of_range(s) == "repair",
    "gap": lambda s: place_of_range(s) == "gap",
    "suffix": lambda s: any(is_in_suffix(s, r) for r in s.running),
    "decoding": lambda s: any(r.num_output_tokens > 1 for r in s.running),
}

#: What may happen to a request.
EVENTS = ("abort", "preempt", "reset")
#: In the queue there is nothing to preempt.
EVENTS_IN_PHASES = [(e, phase) for e in EVENTS for phase in PHASES if (e, phase) != ("preempt", "queued")]


def cold_and_warm(rig: Rig, judge: Judge) -> None:
    """New, found where it was assembled, prepared by itself, and in another order."""
    documents = [rig.document(n, 3) for n in range(3)]
    cold, warm = rig.one(rig.prompt(documents)), rig.one(rig.prompt(documents))
    assert "hit" not in cold.statuses
    assert warm.statuses == ["hit"] * 3
    assert difference(cold, warm) < 1e-5
    rig.reset()
    rig.prefetch(*[SpanPrompt(rig.header + document) for document in documents])
    prepared = rig.one(rig.prompt(documents))
    assert prepared.statuses == ["hit"] * 3
    assert difference(cold, prepared) < 1e-5
    judge.check(cold, warm, rig.one(rig.prompt(documents[::-1])))


def conversation(rig: Rig, repair: int = 0, num_sentences: int = 2) -> SpanPrompt:
    """Two groups of spans with a turn between them, behind a head of more than a block of 32."""
    ids = rig.encode("<|im_start|>system\n" + "Answer from the documents. " * 6 + "<|im_end|>\n")
    spans: list[Span] = []
    for turn in range(2):
        ids += rig.header
        for document in (rig.document(turn, num_sentences), rig.document(turn + 4, num_sentences)):
            spans.append(Span(len(ids), len(ids) + len(document), SpanPrompt(rig.header), repair))
            ids += document
        ids += [*rig.encode(f"\nQuestion {turn}, which takes a few words?<|im_end|>\n"), *rig.answer_header]
    return SpanPrompt(tuple(ids), tuple(spans))


def gaps(rig: Rig, judge: Judge) -> None:
    """Two groups of spans with a turn between them."""
    prompt = conversation(rig)
    cold, warm = rig.one(prompt), rig.one(prompt)
    assert difference(cold, warm) < 1e-5
    judge.check(cold, warm)


def leases(rig: Rig, judge: Judge) -> None:
    """Candidates are taken over by two judges, then computed anew."""
    inner = generate_candidates(rig, 3, lease=Lease(consumers=2))
    outer = rig.judge(inner, repair=4)
    leased, again = rig.one(outer), rig.one(outer)
    assert leased.statuses == again.statuses == ["hit"] * 3
    assert difference(leased, again) < 1e-5
    assert rig.audit()["leases"] == 0
    rig.reset()
    cold = rig.one(outer)
    assert cold.statuses == ["evicted"] * 3
    judge.check(leased, again, cold)


def repair(rig: Rig, judge: Judge) -> None:
    """A part of each span in context, and all of it, which is full attention."""
    documents = [rig.document(n, 3) for n in (2, 3)]
    cold, warm = (rig.one(rig.prompt(documents, repair=12)) for _ in range(2))
    assert difference(cold, warm) < 1e-5
    whole = rig.one(rig.prompt(documents, repair=10_000))
    judge.check(cold, warm, whole)
    assert judge.distance(whole, SpanPrompt(whole.prompt.token_ids)) < 1e-4
    assert judge.distance(cold, SpanPrompt(whole.prompt.token_ids)) > 1e-4


def disturbance(rig: Rig, judge: Judge, event: str) -> None:
    """One event in each phase of a prompt with repair and a gap, all of which take several steps.

    But for its head, which is materialised where documents are missing as well.
    """
    prompt = conversation(rig, repair=14)
    # An answer that ends early would have nothing to preempt.
    prompt = SpanPrompt(prompt.token_ids + rig.endless(5).token_ids, prompt.spans)
    for phase in [phase for happens, phase in EVENTS_IN_PHASES if happens == event and phase != "head"]:
        rig.reset()
        disturbed(rig, judge, prompt, event, phase)


def disturbed(rig: Rig, judge: Judge, prompt: SpanPrompt, event: str, phase: str, budget: int = 8) -> None:
    """Nothing leaks, a request that lives on is right itself, and so is the next one."""
    before = rig.audit()
    task = interrupted(rig, prompt, phase, event, budget)
    if event != "abort":
        judge.check(rig.wait(result(task)))
    rig.assert_idle()
    counts = rig.audit()
    assert counts["leases"] == 0
    if event == "preempt":
        assert counts["preemptions"] > before.get("preemptions", 0)
    if event != "abort" and phase in ("head", "repair", "gap"):
        assert counts["fallen"] > before.get("fallen", 0)
    judge.check(rig.one(prompt))


def disturbed_lease(rig: Rig, judge: Judge) -> None:
    """An inner generation is interrupted while it decodes: what it leaves, if it ends, is right to take over."""
    inner = rig.prompt([rig.document(3, 2), rig.document(4, 2)], repair=14)
    options: dict[str, Any] = {"max_tokens": 14, "lease": Lease()}
    for event in EVENTS:
        rig.reset()
        before = rig.audit().get("preemptions", 0)
        task = interrupted(rig, inner, "decoding", event, **options)
        if event == "abort":
            rig.assert_idle()
            # It may be one that ended at a stop string, which vLLM's client aborts: the lease is the caller's to end.
            rig.wait(rig.engine.release(("decoding",)))
            assert rig.audit()["leases"] == 0
            answer = rig.one(inner, **options)
        else:
            answer = rig.wait(result(task))
            assert rig.audit()["preemptions"] > before
        judge.check(answer)
        assert rig.audit()["leases"] == 1
        outer = rig.one(rig.judge([answer], repair=4))
        assert outer.statuses == ["hit"]
        judge.check(outer)
        assert rig.audit()["leases"] == 0
        rig.assert_idle()


#: What every configuration must do.
NAMED_CASES = (
    *(cold_and_warm, gaps, leases, repair, disturbed_lease),
    *(pytest.param(partial(disturbance, event=event), id=event) for event in ("abort", "preempt")),
)
CASES = (*NAMED_CASES, pytest.param(partial(disturbance, event="reset"), id="reset"))


def interrupted(
    rig: Rig, prompt: SpanPrompt, phase: str, event: str, budget: int = 8, max_tokens: int = 6, **options: Any
) -> asyncio.Task[Answer]:
    """Submit a prompt, step the engine by hand until the phase is reached, let the event happen, and go on.

    `budget`: so few tokens a step that each phase lasts for several.
    """
    before, rig.scheduler.max_num_scheduled_tokens = rig.scheduler.max_num_scheduled_tokens, budget
    with paused(rig) as backend:
        try:
            task = start(rig, prompt, phase, max_tokens, **options)
            rig.wait(until(lambda: bool(backend.queues)))
            if not step_until(rig, PHASES[phase]):
                pytest.fail(f"phase {phase} was never reached")
            match event:
                case "abort":
                    rig.wait(cancelled(task))
                case "preempt":
                    preempt_all(rig)
                case "reset":
                    assert backend.engine.reset_prefix_cache(reset_running_requests=True)
        finally:
            rig.scheduler.max_num_scheduled_tokens = before
    return task


@contextmanager
def paused(rig: Rig) -> Iterator[Any]:
    """The backend of an engine in this process, whose thread steps no more meanwhile; requests still come in."""
    backend: Any = rig.engine._backend
    with backend.lock:
        backend._has_work = lambda: False
    try:
        yield backend
    finally:
        with backend.wake:
            del backend._has_work
            backend.wake.notify()


def start(rig: Rig, prompt: SpanPrompt, name: str, max_tokens: int = 6, **options: Any) -> asyncio.Task[Answer]:
    """Submit a request without waiting for it."""

    async def submit() -> asyncio.Task[Answer]:
        return asyncio.ensure_future(rig.run(prompt, max_tokens, name, **options))

    return rig.wait(submit())


def step_until(rig: Rig, reached: Callable[[Any], bool], limit: int = 200) -> bool:
    """Step the paused engine by hand until the scheduler shows what is wanted."""
    for _ in range(limit):
        if reached(rig.scheduler):
            return True
        with rig.engine._backend.lock:
            rig.engine._backend._step()
    return False


def preempt_all(rig: Rig) -> None:
    """Preempt what runs, as vLLM does where memory is short: from the end of the running list."""
    scheduler = rig.scheduler
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), 0.0, drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.clear()


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - set by another thread
        await asyncio.sleep(0.005)


async def result(task: asyncio.Task[Answer]) -> Answer:
    return await task
