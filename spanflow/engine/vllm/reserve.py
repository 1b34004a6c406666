"""Memory for the first span request in the queue: what is held back for it, and when others wait behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanflow.engine.vllm.contract import KVCacheBlock
from spanflow.engine.vllm.copies import Found
from spanflow.engine.vllm.state import SpanRequest

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver

#: After so many steps in which the first span request found no memory, all others wait behind it.
PATIENCE = 100


class Reserve:
    """The sources of the first span request, pinned from one step to the next, and whether it has waited for too long.

    Each request counts the steps in which it stood first and went without memory, or with a source that did not run.
    One that was preempted may stand before it for some steps in between; that takes nothing off the count.
    """

    def __init__(self, spans: Resolver) -> None:
        self.spans = spans
        self.blocks: list[KVCacheBlock] = []
        self.owner = ""

    @property
    def is_closed(self) -> bool:
        """Whether the first span request has waited for so long that whoever comes after it waits behind it."""
        return self.spans.connector.closed

    def hold_back(self, state: SpanRequest, found: Sequence[Found | None], is_stuck: bool) -> None:
        """Pin what the first span request has already, until the next step looks again, or it is gone."""
        assert not self.blocks, "only the first span request in the queue holds anything back"
        self.owner = state.request.request_id
        state.num_starved += is_stuck
        self.blocks = [block for item in found if item for block in item.blocks]
        self.spans.residency.pin(self.blocks)
        self.spans.connector.closed = state.num_starved > PATIENCE

    def release(self) -> None:
        """Hold nothing back any more."""
        blocks, self.blocks = self.blocks, []
        self.spans.residency.unpin(blocks)

    def gone(self, name: str) -> None:
        """A request is finished, or has its blocks."""
        if name == self.owner:
            self.release()
            self.owner = ""

    def yield_to_running(self) -> None:
        """Who runs goes first: held back from them, memory would be missing for ever, and they would start again and
        again."""
        if self.blocks and self.spans.manager.block_pool.get_num_free_blocks() < self._wanted_by_running():
            self.release()

    def _wanted_by_running(self) -> int:
        """How many blocks the running requests may want in the next step."""
        scheduler, size, wanted = self.spans.scheduler, self.spans.block_size, 0
        for request in scheduler.running:
            end = min(request.num_tokens + 1, request.num_computed_tokens + scheduler.max_num_scheduled_tokens)
            held = len(self.spans.manager.get_blocks(request.request_id).blocks[0])
            wanted += max(0, -(-end // size) - held)
        return wanted
