"""The phases of a request with spans, as its scheduler shows them between two steps, and what may happen in each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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


def preempt_all(scheduler: Any) -> None:
    """Preempt what runs, as vLLM does where memory is short: from the end of the running list."""
    while scheduler.running:
        scheduler._preempt_request(scheduler.running.pop(), 0.0, drop_stale_output=True)
    scheduler.prev_step_scheduled_req_ids.clear()


#: The variable that says where a test listens to a halting scheduler.
ADDRESS = "SPANFLOW_TEST_HALTS"
#: Seconds that the two wait for each other.
PATIENCE = 60


@dataclass(frozen=True)
class Halt:
    """In which phase an engine is to halt for which event, with so few tokens a step that phases last for several."""

    phase: str
    event: str
    budget: int


@dataclass(frozen=True)
class Budget:
    """So many tokens a step from now on; None as many as the engine was started with."""

    tokens: int | None
