"""The named subset of cases that other configurations run too, and how a paused engine is driven into a phase."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import pytest
from phases import EVENTS, EVENTS_IN_PHASES, PATIENCE, PHASES, Halt, preempt_all
from vllm_rig import Answer, Judge, Rig, difference, generate_candidates

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import Span, SpanPrompt

T = TypeVar("T")


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


def conversation(rig: Rig, repair: int = 0) -> SpanPrompt:
    """Two groups of spans with a turn between them, behind a head of more than a block of 32."""
    ids = rig.encode("<|im_start|>system\n" + "Answer from the documents. " * 6 + "<|im_end|>\n")
    spans: list[Span] = []
    for turn in range(2):
        ids += rig.header
        for document in (rig.document(turn, 2), rig.document(turn + 4, 2)):
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


def disturbed_judge(rig: Rig, judge: Judge, event: str, phase: str) -> None:
    """Its candidates are leased; where they are lost they are materialised."""
    rig.reset()
    prompt = rig.judge(generate_candidates(rig, 3, max_tokens=14), repair=7)
    assert rig.audit()["leases"] == 3
    if phase == "materialising":
        rig.reset()
    # The text between two candidates is of one token or two.
    disturbed(rig, judge, prompt, event, phase, budget=2 if phase == "gap" else 5)


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


#: Interruptions that every configuration must stand,
DISTURBANCES = (
    disturbed_lease,
    *(pytest.param(partial(disturbance, event=event), id=event) for event in ("abort", "preempt")),
)
#: and all that it must do.
NAMED_CASES = (cold_and_warm, gaps, leases, repair, *DISTURBANCES)
#: Where the cache is reset as well.
RESET = pytest.param(partial(disturbance, event="reset"), id="reset")


def check_budgets(rig: Rig, judge: Judge, told: Callable[[int | None], int]) -> None:
    """Sources of more than 600 tokens and ranges of 100, in steps of 64, of 512, and of all there is: equal.

    `told` sets how many tokens a step may have, and says how many the largest one had since the last time.
    """
    prompt = rig.prompt([rig.document(0, 22), rig.document(3, 22)], repair=100)
    assert all(len(span) > 600 for span in prompt.spans)
    answers, most = [], []
    for budget in (64, 512, None):
        told(budget)
        rig.reset()
        answers.append(rig.one(prompt))
        most.append(told(None))
    assert most[:2] == [64, 512]
    assert most[2] > 1200
    judge.check(*answers)
    assert all(difference(answers[0], other) < 1e-5 for other in answers[1:])


def interrupted(
    rig: Rig, prompt: SpanPrompt, phase: str, event: str, budget: int = 8, max_tokens: int = 6, **options: Any
) -> asyncio.Task[Answer]:
    """Submit a prompt, let the engine run until the phase is reached, let the event happen, and go on.

    `budget`: so few tokens a step that each phase lasts for several.
    """
    if rig.halts is not None:
        return _halted(rig, prompt, Halt(phase, event, budget), max_tokens, **options)
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
                    preempt_all(rig.scheduler)
                case "reset":
                    assert backend.engine.reset_prefix_cache(reset_running_requests=True)
        finally:
            rig.scheduler.max_num_scheduled_tokens = before
    return task


def _halted(rig: Rig, prompt: SpanPrompt, halt: Halt, max_tokens: int, **options: Any) -> asyncio.Task[Answer]:
    """The same where the engine has a process of its own, and a scheduler that halts there."""
    rig.halts.send(halt)
    task = start(rig, prompt, halt.phase, max_tokens, **options)
    if not rig.halts.poll(PATIENCE):
        pytest.fail(f"phase {halt.phase} was never reached")
    assert rig.halts.recv() == halt
    done: asyncio.Task[None] | None = None
    match halt.event:
        case "abort":
            rig.wait(cancelled(task))
        case "reset":  # it is told when it is done, so once the engine goes on
            done = rig.wait(begun(rig.engine.reset()))
    rig.wait(asyncio.sleep(0.05))  # an abort is on its way to the other process
    rig.halts.send("go on")
    if not rig.halts.poll(PATIENCE):
        pytest.fail(f"in phase {halt.phase} came no {halt.event}")
    assert rig.halts.recv() is True, f"when {halt.event} came, phase {halt.phase} was over"
    if done is not None:
        rig.wait(result(done))
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
    return rig.wait(begun(rig.run(prompt, max_tokens, name, **options)))


def step_until(rig: Rig, reached: Callable[[Any], bool], limit: int = 200) -> bool:
    """Step the paused engine by hand until the scheduler shows what is wanted."""
    for _ in range(limit):
        if reached(rig.scheduler):
            return True
        with rig.engine._backend.lock:
            rig.engine._backend._step()
    return False


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - set by another thread
        await asyncio.sleep(0.005)


async def begun(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    return asyncio.ensure_future(work)


async def result(task: asyncio.Task[T]) -> T:
    return await task
