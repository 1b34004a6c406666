"""Families: a parent and the virtual requests that compute ranges of it in context.

A range is a request over the parent's own blocks whose computed tokens end where the range begins.
All sequences of a step write their K and V before attention reads, so ranges and the parent's rest
are right in one step, as long as nobody runs before a range in front of it has been scheduled. The
order of the queue of block holders and the length of the ranges see to that; `scheduled` checks it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanflow.engine.assembly import Range, split
from spanflow.engine.vllm.contract import AsyncScheduler, RequestStatus, SchedulerOutput
from spanflow.engine.vllm.spawn import internal_request
from spanflow.engine.vllm.state import Family, SpanRequest

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver


class Families:
    """The families whose parent waits on the queue of block holders, by its name; a family falls as one."""

    def __init__(self, spans: Resolver) -> None:
        self.spans = spans
        self.waiting: dict[str, Family] = {}
        self.assembling: set[bytes] = set()
        self.dropped: set[str] = set()

    def is_assembling(self, state: SpanRequest) -> bool:
        """Whether an equal assembly is under way, so that waiting a step makes this one a prefix hit."""
        return self._block_hash(state, -1) in self.assembling

    def is_making_head(self, state: SpanRequest) -> bool:
        """Whether a family computes the full blocks of the same head."""
        return self._block_hash(state, 0) in self.assembling

    def start(self, state: SpanRequest, ranges: tuple[Range, ...]) -> None:
        """Queue the ranges and behind them the parent, whose blocks are allocated and whose moves are queued."""
        scheduler, parent = self.spans.scheduler, state.request
        # vLLM cuts longer prefills to this threshold and still admits what stands behind them.
        pieces = split(ranges, scheduler.scheduler_config.long_prefill_token_threshold)
        state.num_families += 1
        names = [f"{parent.request_id}#{state.num_families}-{low}" for low, _ in pieces]
        family = Family(parent, dict(zip(names, pieces, strict=True)), self._makes(state, ranges))
        blocks = self.spans.manager.get_blocks(parent.request_id).blocks[0]
        size = self.spans.block_size
        for number, (name, (low, high)) in enumerate(family.members.items()):
            child = internal_request(name, parent.all_token_ids[:high], parent, None, len(pieces) - number)
            child.num_computed_tokens = low
            # Shares the parent's blocks as if all of them were hits: none is cached through the child.
            shared = blocks[: -(-high // size)]
            self.spans.manager.coordinator.allocate_new_computed_blocks(name, (shared,), len(shared) * size, 0)
            self.spans.internal[name] = family
            scheduler.add_plain(child)
            if not low:  # vLLM takes a request that has computed nothing for one that holds no blocks.
                scheduler.waiting.remove_request(child)
                scheduler.kv_holding_waiting.add_request(child)
        scheduler.waiting.remove_request(parent)
        scheduler.kv_holding_waiting.add_request(parent)
        self.waiting[parent.request_id] = family
        self.assembling |= family.makes

    def scheduled(self, output: SchedulerOutput) -> None:
        """Check each family's order; those whose parent ran are done."""
        requests = self.spans.scheduler.requests
        for name, family in list(self.waiting.items()):
            complete = True
            for member, (low, high) in family.members.items():
                child = requests.get(member)
                if child is None:
                    continue
                if not complete and child.num_computed_tokens > low:
                    raise AssertionError(f"range {member} ran before a range in front of it")
                complete = complete and child.num_computed_tokens >= high
            if name in output.num_scheduled_tokens:
                if not complete:
                    raise AssertionError(f"request {name} ran before its ranges")
                self.spans.counters["ranges"] += len(family.members)
                self.spans.counters["context_tokens"] += sum(high - low for low, high in family.members.values())
                self._end(name)

    def recover(self) -> None:
        """Bring families down that lost a member, and drop what is left of them."""
        for name in [name for name, family in self.waiting.items() if family.fallen]:
            self._fall(name)
        self.settle()

    def preempted(self, name: str) -> bool:
        """Note a preempted member; True where it was one."""
        family = self.spans.internal.get(name)
        if not isinstance(family, Family):
            return False
        self.dropped.add(name)
        family.fallen = True
        return True

    def parent_gone(self, name: str) -> None:
        """The parent has finished or was aborted: nothing waits for its ranges any more."""
        if name in self.waiting:
            self.dropped |= self.waiting[name].members.keys()
            self._end(name)

    def fall_all(self) -> None:
        """Bring all families down, as before the cache is reset."""
        for name in list(self.waiting):
            self._fall(name)

    def settle(self) -> None:
        """Finish members that nobody needs any more; not during vLLM's own scheduling, whose lists hold them."""
        names = self.dropped & self.spans.scheduler.requests.keys()
        self.dropped.clear()
        if names:
            AsyncScheduler.finish_requests(self.spans.scheduler, names, RequestStatus.FINISHED_ABORTED)

    def _end(self, name: str) -> None:
        self.assembling -= self.waiting.pop(name).makes

    def _fall(self, name: str) -> None:
        """Free parent and members; the parent is resolved again."""
        family = self.waiting[name]
        self._end(name)
        self.dropped |= family.members.keys()
        self.settle()
        spans, parent = self.spans, family.parent
        spans.counters["fallen"] += 1
        spans.scheduler.kv_holding_waiting.remove_request(parent)
        spans.manager.free(parent)
        parent.num_computed_tokens = 0
        spans.scheduler.waiting.prepend_request(parent)
        spans.hold(spans.known[name])

    def _makes(self, state: SpanRequest, ranges: tuple[Range, ...]) -> frozenset[bytes]:
        """Hashes of the last full block before the suffix, if a span begins before its end, and of the head's last one,
        if a range computes it."""
        assert state.assembly is not None
        size, segments, made = self.spans.block_size, state.assembly.segments, []
        if segments[-1].end // size > segments[0].end // size:
            made.append(self._block_hash(state, -1))
        if ranges and ranges[0][0] < segments[0].end // size * size:
            made.append(self._block_hash(state, 0))
        return frozenset(filter(None, made))

    def _block_hash(self, state: SpanRequest, segment: int) -> bytes | None:
        """The hash of the last full block before a segment's end: equal for equal prompts of one tenant up to there."""
        assert state.assembly is not None
        index = state.assembly.segments[segment].end // self.spans.block_size - 1
        return state.request.block_hashes[index] if index >= 0 else None
