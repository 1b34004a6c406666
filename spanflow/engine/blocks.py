"""A pool of KV blocks without KV: who holds which, what each one is the KV of, which goes next."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from hashlib import blake2b

import numpy as np

from spanflow.lowering.prompt import SpanPrompt

#: Eviction order: blocks that hold nothing, copies inside assembled prompts, the rest; each by last use.
_BLANK, _COPY, _KEPT = range(3)


class PoolFull(Exception):
    """More blocks are wanted than are free; the engine answers it by waiting, callers never see it."""


class BlockPool:
    """Blocks by number, counted holders each; a free block keeps its contents until it is taken again."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self._key: list[bytes | None] = [None] * num_blocks
        self._is_copy = [False] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._free: tuple[dict[int, None], ...] = (dict.fromkeys(range(num_blocks)), {}, {})

    def copy(self) -> BlockPool:
        """An independent pool in the same state."""
        new = BlockPool(0)
        new.num_blocks = self.num_blocks
        new.refs, new._key, new._is_copy = self.refs.copy(), self._key.copy(), self._is_copy.copy()
        new._by_key, new._free = self._by_key.copy(), tuple(queue.copy() for queue in self._free)
        return new

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return sum(map(len, self._free))

    def find(self, key: bytes) -> int | None:
        """The block that holds this content, held or free."""
        return self._by_key.get(key)

    def touch(self, blocks: Iterable[int]) -> None:
        """Hold these blocks once more."""
        for block in blocks:
            if not self.refs[block]:
                del self._free[self._rank(block)][block]
            self.refs[block] += 1

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks, first in eviction order, emptied. Raises PoolFull and then takes none."""
        if count > self.num_free:
            raise PoolFull(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        taken: list[int] = []
        for queue in self._free:
            while queue and len(taken) < count:
                block = next(iter(queue))
                del queue[block]
                if (key := self._key[block]) is not None:
                    del self._by_key[key]
                self._key[block], self._is_copy[block], self.refs[block] = None, False, 1
                taken.append(block)
        return taken

    def register(self, block: int, key: bytes, *, is_copy: bool) -> None:
        """Say what a held block is the KV of; where another one has it already, this one stays blank."""
        if (other := self._by_key.get(key)) is None:
            self._by_key[key], self._key[block], self._is_copy[block] = block, key, is_copy
        elif not is_copy:
            self.keep(other)

    def keep(self, block: int) -> None:
        """This block turned out to be more than a copy: it is evicted with the rest."""
        if self._is_copy[block]:
            self._is_copy[block] = False
            if not self.refs[block]:
                del self._free[_COPY][block]
                self._free[_KEPT][block] = None

    def free(self, blocks: list[int]) -> None:
        """Let go of these blocks, the last one first, so that the end of a prompt is evicted before its beginning."""
        for block in reversed(blocks):
            self.refs[block] -= 1
            assert self.refs[block] >= 0, f"block {block} is freed more often than held"
            if not self.refs[block]:
                self._free[self._rank(block)][block] = None

    def forget(self) -> None:
        """Nothing is found any more; holders keep their blocks."""
        self._by_key.clear()
        self._key = [None] * self.num_blocks
        self._is_copy = [False] * self.num_blocks
        self._free = (dict.fromkeys(block for queue in self._free for block in queue), {}, {})

    def _rank(self, block: int) -> int:
        if self._key[block] is None:
            return _BLANK
        return _COPY if self._is_copy[block] else _KEPT

    def problems(self, holders: Iterable[list[int]]) -> list[str]:
        """What is wrong in the books, given the blocks that every known holder has."""
        wanted = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                wanted[block] += 1
        found = [f"block {b}: {self.refs[b]} holders, {n} known" for b, n in enumerate(wanted) if self.refs[b] != n]
        free = [block for queue in self._free for block in queue]
        if sorted(free) != [b for b in range(self.num_blocks) if not self.refs[b]]:
            found.append("the free blocks are not those without a holder")
        found += [f"block {b} does not hold what it is found by" for k, b in self._by_key.items() if self._key[b] != k]
        return found


def block_keys(owner: Hashable, prompt: SpanPrompt, block_size: int, *, tail: bool = False) -> list[bytes]:
    """Content keys of the full blocks of a prompt, each covering everything before it; `tail`: that of the last block
    too, where the prompt does not fill it.

    `owner` (tenant) separates; spans that reach into a block are part of its key, so KV that was
    assembled is never taken for that of full attention.
    """
    ids = np.asarray(prompt.token_ids, dtype="<i8")
    parent = blake2b(repr(owner).encode(), digest_size=16).digest()
    keys, spans, first = [], prompt.spans, 0
    for start in range(0, len(ids) if tail else len(ids) // block_size * block_size, block_size):
        end = min(start + block_size, len(ids))
        while first < len(spans) and spans[first].end <= start:
            first += 1
        hasher = blake2b(parent + ids[start:end].tobytes(), digest_size=16)
        for span in spans[first:]:
            if span.start >= end:
                break
            taken = -1 if span.num_taken is None else span.num_taken
            about = np.asarray((span.start, span.end, span.repair, taken), dtype="<i8").tobytes()
            hasher.update(about + span.anchor.digest)
        parent = hasher.digest()
        keys.append(parent)
    return keys
