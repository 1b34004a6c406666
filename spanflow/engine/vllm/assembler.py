"""Finding what a prompt is assembled from, giving the request its blocks, and queueing the moves.

Where memory is short, sources that nobody else refers to are taken over: their blocks become the
request's own, and the step's moves read and write the same blocks. Such a source is gone, but what the
request made of it is remembered as a source at another position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spanflow.engine.assembly import Assembly, Segment
from spanflow.engine.vllm.contract import KVCacheBlock, KVCacheBlocks
from spanflow.engine.vllm.copies import Found, Relocated
from spanflow.engine.vllm.state import SourceState, SpanRequest
from spanflow.kernels.slots import Move

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver

#: How often keys may be rotated before they are computed anew, by the bytes of a stored number. Each rotation rounds
#: once more, and errors add up like a random walk: in bfloat16 one costs up to 0.24% of a key's length, 10 cost 0.9%.
MAX_ROTATIONS = {4: 1000, 2: 10}


class Assembler:
    """Puts prompts together from what is in the pool; `pins` hold this step's sources until it is scheduled."""

    def __init__(self, spans: Resolver) -> None:
        self.spans = spans
        self.pins: list[KVCacheBlock] = []
        spec = spans.scheduler.kv_cache_config.kv_cache_groups
        itemsize = spec[0].kv_cache_spec.dtype.itemsize if not spans.unsupported else 0
        self.max_rotations = MAX_ROTATIONS.get(itemsize, 0)

    def take_pins(self) -> list[KVCacheBlock]:
        """The pins of this step, to be given up by the caller."""
        pins, self.pins = self.pins, []
        return pins

    def locate(self, segment: Segment, source: SourceState) -> Found | None:
        """Where a segment's KV is: as it was computed, or else where a prompt that took it over has it; or None."""
        size, keys, residency = self.spans.block_size, source.keys, self.spans.residency
        start, end = segment.source_start, segment.source_start + segment.end - segment.start
        first, last = start // size, -(-end // size)
        blocks = residency.cached(keys.full[first : min(last, len(keys.full))])
        if blocks is not None and last > len(keys.full):
            tail = residency.tail(keys.tail_key, keys.tail)
            blocks = [*blocks, tail.block] if tail is not None else None
        if blocks is not None:
            return Found(blocks, start % size, start)
        # A head is not looked for where another prompt moved it: off its alignment it takes a block more, which nobody
        # could take over.
        copies = self.spans.copies
        relocated = (copies.heads if segment.span < 0 else copies.relocated).get(keys.key)
        if relocated is None or relocated.rotations >= self.max_rotations:
            return None
        return relocated.find(start, end, size)

    def assemble(
        self,
        state: SpanRequest,
        todo: Assembly,
        hits: KVCacheBlocks,
        num_cached: int,
        found: Sequence[Found | None],
        may_take_over: bool,
        num_kept: int,
    ) -> bool:
        """Allocate the request's blocks and queue its moves. False where memory is short: `num_kept` of the free blocks
        are for others."""
        spans, request = self.spans, state.request
        state.taken.clear()  # An earlier try may have been preempted.
        for source in state.sources:
            source.is_taken = False
        pins = [block for item in found if item for block in item.blocks]
        spans.residency.pin(pins)
        num_blocks = -(-request.num_tokens // spans.block_size) - num_cached // spans.block_size
        # Adopted prefix blocks that nobody holds leave the free queue too.
        num_blocks += sum(block.ref_cnt == 0 for block in hits.blocks[0])
        spans.copies.make_way(num_blocks)
        missing = num_blocks + num_kept - spans.manager.block_pool.get_num_free_blocks()
        if missing > 0 and may_take_over:
            pins = self._take_over(state, todo, hits, found, pins, missing)
        if missing > 0 and num_kept and not state.taken:
            spans.residency.unpin(pins)
            return False
        placed = spans.manager.allocate_slots(
            request,
            request.num_tokens - todo.suffix,
            num_new_computed_tokens=num_cached,
            new_computed_blocks=hits,
            num_external_computed_tokens=todo.suffix - num_cached,
            delay_cache_blocks=True,
            has_scheduled_reqs=False,  # what vLLM keeps free beside these is among `num_kept`
        )
        if placed is None:
            spans.residency.unpin(pins)
            return False
        self.pins += pins
        table = spans.manager.get_blocks(request.request_id).get_block_ids()[0]
        for segment, item in zip(todo.segments, found, strict=True):
            assert item is not None
            spans.connector.pending.moves.append(self._move(segment, item, table))
        num_moved = sum(segment.end - segment.start for segment in todo.segments)
        if request.prefill_stats is not None and request.num_preemptions <= 0:
            request.prefill_stats.set(request.num_prompt_tokens, num_cached, num_moved)
        spans.manager.record_prefix_cache_stats(request, num_cached)
        spans.counters["moved_tokens"] += num_moved
        request.num_computed_tokens = todo.suffix
        return True

    def relocate(self, state: SpanRequest, blocks: Sequence[KVCacheBlock]) -> None:
        """Before a request's blocks are freed: remember where the sources are that it took over, and what its head has
        behind its full blocks: computed with its prompt, it has no other source."""
        assert state.assembly is not None
        size, copies = self.spans.block_size, self.spans.copies
        end = state.assembly.segments[0].end
        last = end // size
        if end % size and len(blocks) > last and (block := blocks[last]).block_hash is not None:
            where = Relocated(last * size, end, (block,), (block.block_hash,), 0, 0, 0)
            copies.heads.keep(state.sources[0].keys.key, where)
        for segment, rotations in state.taken:
            low, high = segment.start // size, -(-segment.end // size)
            own = tuple(blocks[low:high])
            hashes = tuple(block.block_hash for block in own)
            if len(own) < high - low or None in hashes:
                continue  # Its blocks are not full, so nobody could tell later whether they are still the same.
            end = segment.source_start + segment.end - segment.start
            where = Relocated(segment.source_start, end, own, hashes, segment.start % size, segment.delta, rotations)
            copies.relocated.keep(state.source(segment).keys.key, where)

    def _take_over(
        self,
        state: SpanRequest,
        todo: Assembly,
        hits: KVCacheBlocks,
        found: Sequence[Found | None],
        pins: list[KVCacheBlock],
        missing: int,
    ) -> list[KVCacheBlock]:
        """Free the blocks of sources that only this request refers to, as long as `missing` blocks are not there.

        They are the next that the pool hands out, and nobody writes them before the step's moves have read them.
        Returns the pins that are left: `pins` where it would not help.
        """
        num_pins = Counter(block.block_id for block in pins)
        adopted = {block.block_id for block in hits.blocks[0]}
        exclusive = [
            {
                block.block_id: block
                for block in item.blocks
                if block.ref_cnt == num_pins[block.block_id] and block.block_id not in adopted
            }
            for item in found
            if item
        ]
        others = {
            source.keys.key
            for name, other in self.spans.held.items()
            if name != state.request.request_id
            for source in other.sources
        }
        order = sorted(
            (number for number, segment in enumerate(todo.segments) if segment.span >= 0),
            key=lambda n: (state.source(todo.segments[n]).keys.key in others, -len(exclusive[n])),
        )
        taken: dict[int, KVCacheBlock] = {}
        for number in order:
            if len(taken) >= missing:
                break
            taken |= exclusive[number]
        if len(taken) < missing:
            return pins
        for segment, item in zip(todo.segments, found, strict=True):
            assert item is not None
            if any(block.block_id in taken for block in item.blocks):
                state.source(segment).is_taken = True
                state.taken.append((segment, item.rotations + 1))
        self.spans.residency.disown(taken.values())
        self.spans.residency.unpin([block for block in pins if block.block_id in taken])
        self.spans.counters["taken_over"] += sum(source.is_taken for source in state.sources)
        self.spans.connector.pending.in_place = True
        return [block for block in pins if block.block_id not in taken]

    def _move(self, segment: Segment, found: Found, table: list[int]) -> Move:
        size = self.spans.block_size
        return Move(
            tuple(block.block_id for block in found.blocks),
            found.offset,
            tuple(table[segment.start // size : -(-segment.end // size)]),
            segment.start % size,
            segment.end - segment.start,
            segment.start - found.position,
        )
