"""Assembled copies: the first to go when memory is short, and what is left of a source that was taken over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from spanflow.engine.recent import Recent
from spanflow.engine.vllm.contract import BlockPool, KVCacheBlock


class Copies:
    """Blocks of assembled prompts, in order of last use.

    vLLM's free queue is in order of last use too, so a few prompts' copies would push out the sources that
    they, and all later prompts, are made from. Copies stay findable, for a follow-up turn, but whenever
    blocks are about to be handed out, copies are put in front of what would go otherwise.
    """

    def __init__(self, pool: BlockPool, tails: Container[int]) -> None:
        self.pool = pool
        self.tails = tails
        # What is left of sources that were taken over, and where a prompt has the end of its head.
        self.relocated: Recent[Hashable, Relocated] = Recent(pool.num_gpu_blocks)
        self.heads: Recent[Hashable, Relocated] = Recent(pool.num_gpu_blocks)
        self._hashes: OrderedDict[int, Hashable] = OrderedDict()

    def add(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take note of blocks that were just freed, in their order of eviction."""
        for block in blocks:
            if block.block_hash is not None:
                self._hashes[block.block_id] = block.block_hash
                self._hashes.move_to_end(block.block_id)

    def make_way(self, num_blocks: int) -> None:
        """Let the next `num_blocks` of the free queue hold nothing worth keeping, as far as there are copies."""
        if not self._hashes:
            return
        queue = self.pool.free_block_queue
        front = list(islice(queue.iter_blocks_after(None), num_blocks))
        first = [block for block in front if not self._is_worth_keeping(block)]
        if len(first) == len(front):
            return
        ids = {block.block_id for block in first}
        reused = []
        for block_id, block_hash in self._hashes.items():
            block = self.pool.blocks[block_id]
            if block.block_hash != block_hash:
                reused.append(block_id)
            elif block.ref_cnt == 0 and block_id not in ids:
                first.append(block)
                if len(first) == len(front):
                    break
        for block_id in reused:
            del self._hashes[block_id]
        for block in first:
            queue.remove(block)
        queue.prepend_n(first)

    def _is_worth_keeping(self, block: KVCacheBlock) -> bool:
        if block.block_hash is None:
            return block.block_id in self.tails
        return bool(self._hashes.get(block.block_id) != block.block_hash)


@dataclass(frozen=True, slots=True)
class Found:
    """Where the KV of a segment lies: its first token in slot `offset` of the first block, its keys rotated for
    `position`. `rotations` counts how often they were rotated before, each time with a rounding."""

    blocks: Sequence[KVCacheBlock]
    offset: int
    position: int
    rotations: int = 0


@dataclass(frozen=True, slots=True)
class Relocated:
    """Tokens `[start, end)` of a source that was taken over, inside the prompt that took it, `shift` positions on; or
    the end of a head, inside a prompt that begins with it."""

    start: int
    end: int
    blocks: tuple[KVCacheBlock, ...]
    hashes: tuple[Hashable, ...]
    offset: int
    shift: int
    rotations: int

    def find(self, start: int, end: int, block_size: int) -> Found | None:
        """Tokens `[start, end)` of the source, or None where they are not, or no longer, here."""
        if not self.start <= start < end <= self.end:
            return None
        first = self.offset + start - self.start
        low, high = first // block_size, -(-(first + end - start) // block_size)
        if any(block.block_hash != h for block, h in zip(self.blocks[low:high], self.hashes[low:high], strict=True)):
            return None
        return Found(self.blocks[low:high], first % block_size, start + self.shift, self.rotations)
