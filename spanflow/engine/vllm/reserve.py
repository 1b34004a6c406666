"""Memory for the first span request in the queue: what is held back for it, and when others wait behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanflow.engine.vllm.contract import KVCacheBlock, Request
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
        if self.blocks and self.spans.manager.block_pool.get_num_free_blocks() < self.wanted_by_running():
            self.release()

    def wanted_by_running(self) -> int:
        """How many blocks the running requests may want in the next step, and vLLM keeps free beside them."""
        spans, scheduler = self.spans, self.spans.scheduler
        held = [len(spans.manager.get_blocks(request.request_id).blocks[0]) for request in scheduler.running]
        wanted = sum(map(self._wanted, scheduler.running, held))
        most: int = scheduler.max_num_scheduled_tokens // spans.block_size + len(held)
        spare: int = spans.manager.watermark_blocks if held else 0
        return min(wanted, most) + spare

    def wanted_by(self, request: Request) -> int:
        """How many blocks vLLM may give to an ordinary request that waits; to ours and those that we hold, none."""
        spans, name = self.spans, request.request_id
        if name in spans.internal or name in spans.connector.held:
            return 0
        hits, num_cached, _ = spans.manager.get_computed_blocks(request)
        in_queue: int = sum(block.ref_cnt == 0 for block in hits.blocks[0])  # of free blocks, which adopting takes too
        return in_queue + self._wanted(request, len(hits.blocks[0]), num_cached)

    def _wanted(self, request: Request, num_held: int, num_computed: int | None = None) -> int:
        num_done = request.num_computed_tokens if num_computed is None else num_computed
        most = num_done + self.spans.scheduler.max_num_scheduled_tokens
        num_blocks: int = -(-min(request.num_tokens + request.num_output_placeholders, most) // self.spans.block_size)
        return max(0, num_blocks - num_held)
