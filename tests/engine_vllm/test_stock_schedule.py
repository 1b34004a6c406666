"""Requests without spans are scheduled as stock vLLM schedules them: step by step, on the real schedulers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spanflow.lowering.prompt import SpanPrompt

pytestmark = pytest.mark.vllm

_BLOCK = 16

#: Tokens scheduled per request, requests preempted, requests finished: of one step.
Step = tuple[dict[str, int], set[str], set[str]]


def play(engine: Any, seed: int, policy: str) -> list[Step]:
    """Plain requests of mixed lengths that share beginnings come over many steps; what was scheduled in each."""
    drawn = random.Random(seed)
    for _ in range(30):
        shared = drawn.choice([0, 20, 50])
        own = drawn.randint(1, 90)
        prompt = SpanPrompt((*range(300, 300 + shared), *(drawn.randrange(1000) for _ in range(own))))
        priority = {"priority": drawn.randint(0, 3)} if policy == "priority" else {}
        engine.send(prompt, drawn.choice([1, 2, 7, 30, 60]), arrival_time=float(len(engine.sent)), **priority)
        for _ in range(drawn.randint(0, 3)):
            engine.step()
    if seed % 2:
        engine.abort(drawn.choice(list(engine.scheduler.requests)))
    engine.finish()
    return [(dict(s.num_scheduled_tokens), set(s.preempted_req_ids or ()), s.finished_req_ids) for s in engine.steps]


@pytest.fixture
def start(model_dir: Path) -> Callable[..., Any]:
    from symbolic_engine import SymbolicEngine

    return lambda num_blocks, **options: SymbolicEngine(model_dir, num_blocks, _BLOCK, **options)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("budget", [32, 256])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("num_blocks", [14, 60])
def test_plain_requests_are_scheduled_as_by_stock_vllm(
    start: Callable[..., Any], num_blocks: int, lag: int, budget: int, policy: str
) -> None:
    """The same tokens of the same requests in each step, the same preemptions, prefix hits and answers."""
    options = {"lag": lag, "max_num_batched_tokens": budget, "scheduling_policy": policy}
    for seed in range(4):
        ours, stock = start(num_blocks, **options), start(num_blocks, stock=True, **options)
        assert type(stock.scheduler).__module__.startswith("vllm.")
        assert stock.scheduler.connector is None
        steps, wanted = play(ours, seed, policy), play(stock, seed, policy)
        assert steps == wanted
        assert {name: sent.tokens for name, sent in ours.sent.items()} == {
            name: sent.tokens for name, sent in stock.sent.items()
        }
        hits = [
            {name: sent.prefill.num_cached_tokens for name, sent in engine.sent.items() if sent.prefill}
            for engine in (ours, stock)
        ]
        assert hits[0] == hits[1]
        # It must be traffic worth comparing.
        assert any(hits[1].values())
        assert any(len(tokens) > 1 for tokens, _, _ in wanted)
        assert num_blocks > 14 or any(preempted for _, preempted, _ in wanted)
        assert budget > 32 or any(sum(tokens.values()) == budget for tokens, _, _ in wanted)


def test_the_same_after_requests_with_spans(start: Callable[..., Any]) -> None:
    """An engine that served spans, and was reset, schedules plain requests as a new one of stock vLLM."""
    from spanflow.lowering.prompt import NO_ANCHOR, Span

    options = {"max_num_batched_tokens": 64, "scheduling_policy": "fcfs"}
    ours, stock = start(20, **options), start(20, stock=True, **options)
    ours.send(SpanPrompt(tuple(range(1, 90)), (Span(9, 50, NO_ANCHOR, 3),)), 4)
    ours.finish()
    ours.reset(running=False)
    ours.sent.clear()
    ours.steps.clear()
    ours._names = itertools.count()
    steps, wanted = play(ours, 2, "fcfs"), play(stock, 2, "fcfs")
    # The finish of what ran before is told to the worker in the next step.
    steps[0] = (steps[0][0], steps[0][1], wanted[0][2])
    assert steps == wanted
