"""Memory for the first span request in the queue: what is held back for it, and when others wait behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanflow.engine.vllm.contract import KVCacheBlock, Request, RequestStatus
from spanflow.engine.vllm.copies import Found
from spanflow.engine.vllm.state import SpanRequest

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver

#: After so many steps in which the first span request found no memory, all others wait behind it.
PATIENCE = 100

#: Others in vLLM's queues wait for something besides memory, and let those behind them pass.
_ADMITTED_NEXT = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Reserve:
    """The sources of the first span request, pinned from one step to the next, and whether it has waited for too long.

    Each request counts the steps in which it stood first and went without memory, or with a source that did not run.
    One that was preempted may stand before it for some steps in between; that takes nothing off the count.
    """

    def __init__(self, spans: Resolver) -> None:
        self.spans = spans
        self.blocks: list[KVCacheBlock] = []
        self.owner = ""

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

    def wanted_first(self) -> int:
        """How many blocks vLLM may give away in the next step before it comes to the queue, or keeps free there: to who
        runs, and to who holds blocks and waits for more."""
        scheduler = self.spans.scheduler
        spare: int = self.spans.manager.watermark_blocks if scheduler.running else 0
        holding = [request for request in scheduler.kv_holding_waiting if request.status in _ADMITTED_NEXT]
        return spare + self._wanted_by_running() + sum(self._lacking(r, r.num_tokens) for r in holding)

    def wanted_by(self, request: Request) -> int:
        """How many blocks vLLM wants for an ordinary request of the queue; for ours and those that we hold, none."""
        spans, name = self.spans, request.request_id
        if name in spans.internal or name in spans.connector.held or request.status not in _ADMITTED_NEXT:
            return 0
        hits = spans.manager.get_computed_blocks(request)[0].blocks[0]
        in_queue: int = sum(block.ref_cnt == 0 for block in hits)  # of free blocks, which adopting takes too
        spare: int = 0 if spans.scheduler.running else spans.manager.watermark_blocks  # who comes before it will run
        return spare + in_queue + self._lacking(request, request.num_tokens) - len(hits)

    def _wanted_by_running(self) -> int:
        """How many blocks the running requests may want in the next step."""
        budget, running = self.spans.scheduler.max_num_scheduled_tokens, self.spans.scheduler.running
        ends = [min(r.num_tokens + r.num_output_placeholders, r.num_computed_tokens + budget) for r in running]
        most: int = budget // self.spans.block_size + len(running)
        return min(most, sum(map(self._lacking, running, ends)))

    def _lacking(self, request: Request, num_tokens: int) -> int:
        """How many blocks a request lacks to hold so many tokens."""
        num_blocks: int = -(-num_tokens // self.spans.block_size)
        return max(0, num_blocks - len(self.spans.manager.get_blocks(request.request_id).blocks[0]))
