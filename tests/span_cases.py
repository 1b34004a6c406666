"""The named subset of cases that other configurations run too, and how a paused engine is driven into a phase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from vllm_rig import Answer, Judge, Rig, difference, generate_candidates

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import Span, SpanPrompt

#: What the scheduler must show for a phase to be reached.
PHASES: dict[str, Callable[[Any], bool]] = {
    "queued": lambda s: bool(s.spans.held),
    "materialising": lambda s: any(name.startswith("spanflow-source") for name in s.requests) and bool(s.running),
    "assembled": lambda s: bool(s.kv_holding_waiting),
    "ranges": lambda s: any("#" in name for name in s.requests),
    "decoding": lambda s: any(r.num_output_tokens > 1 for r in s.running),
}


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


def gaps(rig: Rig, judge: Judge) -> None:
    """Two groups of spans with a turn between them."""
    ids = rig.encode("<|im_start|>system\nAnswer from the documents.<|im_end|>\n")
    spans: list[Span] = []
    for turn in range(2):
        ids += rig.header
        for document in (rig.document(turn, 2), rig.document(turn + 4, 2)):
            spans.append(Span(len(ids), len(ids) + len(document), SpanPrompt(rig.header)))
            ids += document
        ids += [*rig.encode(f"\nQuestion {turn}, which takes a few words?<|im_end|>\n"), *rig.answer_header]
    prompt = SpanPrompt(tuple(ids), tuple(spans))
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


def abort(rig: Rig, judge: Judge) -> None:
    """In the middle of a materialisation, of ranges and of decoding."""
    prompt = rig.prompt([rig.document(3, 2), rig.document(4, 2)], repair=5)
    for phase in ("materialising", "ranges", "decoding"):
        rig.reset()
        rig.wait(cancelled(interrupted(rig, prompt, phase, lambda: None)))
        rig.assert_idle()
        judge.check(rig.one(prompt))


def preemption(rig: Rig, judge: Judge) -> None:
    """In the same phases, while something runs; the request itself must be right."""
    prompt = rig.prompt([rig.document(3, 2), rig.document(4, 2)], repair=14)
    # An answer that ends early would have nothing to preempt.
    prompt = SpanPrompt(prompt.token_ids + rig.endless(5).token_ids, prompt.spans)
    for phase in ("materialising", "ranges", "decoding"):
        rig.reset()
        before = rig.audit().get("preemptions", 0)
        answer = rig.wait(result(interrupted(rig, prompt, phase, lambda: preempt_all(rig), while_running=True)))
        assert len(answer.token_ids) == 6
        assert rig.audit()["preemptions"] > before
        rig.assert_idle()
        judge.check(answer, rig.one(prompt))


CASES = (cold_and_warm, gaps, leases, repair, abort, preemption)


def interrupted(
    rig: Rig, prompt: SpanPrompt, phase: str, event: Callable[[], object], while_running: bool = False
) -> asyncio.Task[Answer]:
    """Submit a prompt, step the engine by hand until the phase is reached, let the event happen, and go on."""
    backend = rig.engine._backend
    # So few tokens a step that each phase lasts for several.
    budget, rig.scheduler.max_num_scheduled_tokens = rig.scheduler.max_num_scheduled_tokens, 5
    backend.pause()
    try:
        task = start(rig, prompt, phase)
        rig.wait(until(lambda: bool(backend.queues)))
        if not step_until(rig, lambda s: PHASES[phase](s) and (not while_running or bool(s.running))):
            pytest.fail(f"phase {phase} was never reached")
        event()
    finally:
        rig.scheduler.max_num_scheduled_tokens = budget
        backend.resume()
    return task


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
        rig.engine._backend.step()
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
