"""The default configuration, interrupted at any time: a long prompt is cancelled, or the cache is reset under it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from span_cases import cancelled, conversation, result, start
from vllm_rig import Answer, Judge, Rig, generate_candidates

from spanflow.lowering.prompt import SpanPrompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def rig(start_rig: Any) -> Rig:
    return start_rig()


@pytest.fixture(scope="module")
def long_prompt(rig: Rig) -> tuple[SpanPrompt, float]:
    """Several thousand tokens of documents, a turn between them, and how many seconds the answer takes where all of
    them are new."""
    prompt = conversation(rig, repair=32, num_sentences=28)
    assert len(prompt) > 2500
    rig.reset()
    begun = time.monotonic()
    rig.one(prompt)
    return prompt, time.monotonic() - begun


def interrupted_at_times(rig: Rig, long_prompt: tuple[SpanPrompt, float], event: Callable[[Any], None]) -> None:
    """Let an event happen after a part of the time that the prompt takes, each time without any cached KV."""
    prompt, seconds = long_prompt
    num_in_flight = 0
    for part in (0.1, 0.3, 0.5, 0.7):
        rig.reset()
        task = start(rig, prompt, f"after-{part}", max_tokens=1)
        time.sleep(part * seconds)
        num_in_flight += not task.done()
        event(task)
        rig.assert_idle()
        assert rig.audit()["leases"] == 0
    assert num_in_flight >= 2, "the engine was done too early for this to say anything"


def test_a_long_prompt_is_cancelled(rig: Rig, judge: Judge, long_prompt: tuple[SpanPrompt, float]) -> None:
    interrupted_at_times(rig, long_prompt, lambda task: rig.wait(cancelled(task)))
    judge.check(rig.one(long_prompt[0]))


def test_the_cache_is_reset_under_a_long_prompt(rig: Rig, judge: Judge, long_prompt: tuple[SpanPrompt, float]) -> None:
    """Its answer is right, and so is the next one."""
    answers: list[Answer] = []

    def reset(task: Any) -> None:
        rig.reset()
        answers.append(rig.wait(result(task)))

    before = rig.audit().get("preemptions", 0)
    interrupted_at_times(rig, long_prompt, reset)
    assert rig.audit()["preemptions"] > before
    judge.check(*answers, rig.one(long_prompt[0]))


@pytest.mark.parametrize("event", ["abort", "reset"])
def test_a_judge_of_leased_candidates_is_interrupted(rig: Rig, judge: Judge, event: str) -> None:
    """Nothing stays leased once the judge has answered, then or when it is asked again."""
    seconds, num_in_flight = 0.0, 0
    for part in (0, 0.3, 0.6):
        rig.reset()
        outer = rig.judge(generate_candidates(rig, 8), repair=16)
        assert rig.audit()["leases"] == 8
        begun = time.monotonic()
        task = start(rig, outer, f"judge-{event}-{part}", max_tokens=1)
        if not part:  # How long it takes where nothing happens.
            answer = rig.wait(result(task))
            seconds = time.monotonic() - begun
            judge.check(answer)
            continue
        time.sleep(part * seconds)
        num_in_flight += not task.done()
        if event == "abort":
            rig.wait(cancelled(task))
        else:
            rig.reset()
            judge.check(rig.wait(result(task)))
        rig.assert_idle()
        judge.check(rig.one(outer))
        assert rig.audit()["leases"] == 0
    assert num_in_flight, "the engine was done too early for this to say anything"
