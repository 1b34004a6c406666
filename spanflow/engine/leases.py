"""Which finished generations are kept for which outer prompts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from spanflow.engine.protocol import EngineRequest, Lease
from spanflow.lowering.prompt import Span, SpanPrompt

T = TypeVar("T")


def tenant(request: EngineRequest) -> Hashable:
    """Requests of different tenants share nothing."""
    return request.salt, request.adapter


@dataclass(slots=True)
class Held(Generic[T]):
    """One leased generation: the tokens that have KV (all but the last sampled), and what the engine keeps."""

    request_id: str
    key: Hashable
    token_ids: tuple[int, ...]
    payload: T
    deadline: float
    consumers: int
    consumed_by: set[str] = field(default_factory=set)


class LeaseBook(Generic[T]):
    """Leases by the prompt that was run, with its spans, and by tenant.

    `drop` is called with the payload of a lease that has ended, once. `clock` gives seconds.
    """

    def __init__(self, drop: Callable[[T], None], clock: Callable[[], float]) -> None:
        self._drop = drop
        self._clock = clock
        self._held: dict[str, Held[T]] = {}
        self._by_key: defaultdict[Hashable, dict[str, Held[T]]] = defaultdict(dict)

    def __len__(self) -> int:
        return len(self._held)

    def copy(self, drop: Callable[[T], None]) -> LeaseBook[T]:
        """An independent book of the same leases, which drops to elsewhere."""
        new = LeaseBook(drop, self._clock)
        for request_id, held in self._held.items():
            new._held[request_id] = new._by_key[held.key][request_id] = replace(held, consumed_by=set(held.consumed_by))
        return new

    def payloads(self) -> list[T]:
        """What is kept for the leases."""
        return [held.payload for held in self._held.values()]

    def add(self, request: EngineRequest, lease: Lease, sampled: tuple[int, ...], payload: T) -> None:
        """Keep a generation that has just finished."""
        self.end(request.request_id)
        key = (tenant(request), request.prompt.digest)
        token_ids = request.prompt.token_ids + sampled[:-1]
        deadline = self._clock() + lease.seconds
        held = Held(request.request_id, key, token_ids, payload, deadline, lease.consumers)
        self._held[request.request_id] = self._by_key[key][request.request_id] = held

    def find(self, owner: Hashable, prompt: SpanPrompt, span: Span) -> Held[T] | None:
        """The lease that holds the KV of a generated span of a tenant's prompt, up to its last token."""
        if span.num_taken is None:
            return None
        self.expire()
        wanted = span.anchor.token_ids + prompt.tokens(span)[:-1]
        inner = span.anchor.followed_by(prompt.tokens(span)[: span.num_taken])
        for held in self._by_key.get((owner, inner.digest), {}).values():
            if held.token_ids[: len(wanted)] == wanted:
                return held
        return None

    def consume(self, held: Held[T], request_id: str) -> None:
        """One outer prompt has taken it over; the last one ends the lease."""
        held.consumed_by.add(request_id)
        if len(held.consumed_by) >= held.consumers:
            self.end(held.request_id)

    def end(self, request_id: str) -> None:
        """End a lease; unknown ids are ignored."""
        held = self._held.pop(request_id, None)
        if held is None:
            return
        del self._by_key[held.key][request_id]
        if not self._by_key[held.key]:
            del self._by_key[held.key]
        self._drop(held.payload)

    def end_oldest(self) -> str | None:
        """End the lease made first; returns its request id, or None where there is no lease."""
        oldest = next(iter(self._held), None)
        if oldest is not None:
            self.end(oldest)
        return oldest

    def expire(self) -> None:
        """End the leases whose time is up."""
        now = self._clock()
        for request_id in [held.request_id for held in self._held.values() if held.deadline <= now]:
            self.end(request_id)

    def clear(self) -> None:
        """End all leases."""
        for request_id in list(self._held):
            self.end(request_id)
