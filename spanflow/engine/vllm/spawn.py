"""Requests of our own: their parent's tenant, priority and place in the queue, one token, no output to anybody."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spanflow.engine.vllm.contract import BlockHash, FCFSRequestQueue, Request, SamplingParams

if TYPE_CHECKING:
    from spanflow.engine.vllm.scheduler import SpanScheduler


def internal_request(
    name: str,
    tokens: Sequence[int],
    parent: Request,
    hasher: Callable[[Request], list[BlockHash]] | None,
    earlier: int = 1,
) -> Request:
    """A request for one token behind `tokens`. `earlier`: how many ticks of the clock it stands before its parent."""
    arrival = parent.arrival_time
    for _ in range(earlier):
        arrival = math.nextafter(arrival, -math.inf)
    return Request(
        request_id=name,
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False),
        pooling_params=None,
        client_index=parent.client_index,
        arrival_time=arrival,
        lora_request=parent.lora_request,
        cache_salt=parent.cache_salt,
        priority=parent.priority,
        block_hasher=hasher,
    )


def queue_before(scheduler: SpanScheduler, request: Request, parent: Request) -> None:
    """Queue `request` right before its parent: by place where the queue is a line, by arrival where it is a heap."""
    scheduler.add_plain(request)
    pull_before(scheduler, request, parent)


def pull_before(scheduler: SpanScheduler, request: Request, parent: Request) -> None:
    """Let a waiting request that stands behind `parent` stand right before it."""
    waiting = scheduler.waiting
    order = list(waiting)
    if request not in order or parent not in order or order.index(request) < order.index(parent):
        return
    waiting.remove_request(request)
    if isinstance(waiting, FCFSRequestQueue):
        waiting.insert(waiting.index(parent), request)
        return
    request.priority = parent.priority
    request.arrival_time = math.nextafter(parent.arrival_time, -math.inf)
    waiting.add_request(request)
