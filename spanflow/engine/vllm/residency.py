"""Where the KV of a source lies: full blocks in vLLM's own prefix cache, and the unfilled blocks behind them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass

from spanflow.engine.protocol import Lease
from spanflow.engine.recent import Recent
from spanflow.engine.vllm.contract import BlockHash, BlockPool, KVCacheBlock

_REMEMBERED = 1 << 16


@dataclass(slots=True, eq=False)
class Tail:
    """The unfilled last block of a finished request, readable until the pool hands it out again.

    Nothing pins it: it stands at the far end of the pool's free queue, and pressure may take it.
    `lease` is None for a materialised source, which is kept as long as the pool keeps it.
    """

    key: bytes
    tokens: tuple[int, ...]
    block: KVCacheBlock
    lease: Lease | None = None
    lease_id: Hashable = None
    consumers: int = 0
    expires: float = math.inf
    alive: bool = True

    @property
    def names(self) -> list[tuple[bytes, tuple[int, ...]]]:
        """What it is found by: its prefix, and each beginning of its tokens."""
        return [(self.key, self.tokens[:end]) for end in range(1, len(self.tokens) + 1)]


class Residency:
    """Finds sources, keeps leases, and remembers what was here once (so that a miss can say why).

    Full blocks are looked up by hash in the pool, like any prefix. What fills no block, the tail of a
    source or of a leased generation, has no hash there and is remembered here.
    """

    def __init__(self, pool: BlockPool, clock: Callable[[], float] = time.monotonic) -> None:
        self.pool = pool
        self.clock = clock
        # By more than the prefix: thousands of short documents may stand behind one header.
        self.tails: dict[tuple[bytes, tuple[int, ...]], dict[int, Tail]] = {}
        self.by_block: dict[int, Tail] = {}
        self.leases: dict[int, Tail] = {}
        # Sources that were materialised, and inner prompts, by tenant, that ran under a lease: outer prompts may take
        # their output over, now or later.
        self.seen: Recent[Hashable, None] = Recent(_REMEMBERED)
        self.inner_prompts: Recent[Hashable, None] = Recent(_REMEMBERED)

    def cached(self, hashes: Sequence[BlockHash]) -> list[KVCacheBlock] | None:
        """The blocks of these hashes, or None where one is missing."""
        blocks = []
        for block_hash in hashes:
            hit = self.pool.get_cached_block(block_hash, [0])
            if hit is None:
                return None
            blocks.append(hit[0])
        return blocks

    def tail(self, key: bytes, tokens: tuple[int, ...]) -> Tail | None:
        """The block that begins with `tokens` behind the prefix that `key` names; of several the one with the least
        behind them, since a longer one is another answer's."""
        found = self.tails.get((key, tokens), {})
        return min(found.values(), key=lambda tail: len(tail.tokens), default=None)

    def keep(
        self,
        key: bytes,
        tokens: tuple[int, ...],
        block: KVCacheBlock,
        lease: Lease | None = None,
        lease_id: Hashable = None,
    ) -> None:
        """Remember a block that its request has just freed; the caller's one reference is given up here."""
        tail = Tail(key, tokens, block, lease, lease_id)
        if lease is not None:
            tail.consumers, tail.expires = lease.consumers, self.clock() + lease.seconds
            self.leases[block.block_id] = tail
        for name in tail.names:
            self.tails.setdefault(name, {})[block.block_id] = tail
        self.by_block[block.block_id] = tail
        self._unpin_tail(tail)

    def pin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Keep blocks from being handed out; each call is undone by one `unpin`."""
        self.pool.touch(blocks)

    def unpin(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Undo `pin`; the blocks are then the last that the pool hands out."""
        plain = []
        for block in reversed(blocks):
            tail = self.by_block.get(block.block_id)
            if tail is None:
                plain.append(block)
            else:
                self._unpin_tail(tail)
        self.pool.free_blocks(plain)

    def disown(self, blocks: Collection[KVCacheBlock]) -> None:
        """Let nobody find anything in these blocks any more: they are about to be written to."""
        for block in blocks:
            tail = self.by_block.get(block.block_id)
            if tail is not None:
                self._forget(tail)
        self.pool.evict_blocks({block.block_id for block in blocks if block.block_hash is not None})

    def consume(self, tail: Tail) -> None:
        """One consumer of a lease has run; the last one ends it."""
        if tail.lease is not None:
            tail.consumers -= 1
            if tail.consumers <= 0:
                self.end(tail)

    def end(self, tail: Tail) -> None:
        """Give a tail up: its block goes to the front of the free queue, where it is reused first."""
        if tail.alive:
            self._forget(tail)
            self.pool.touch([tail.block])
            self.pool.free_blocks([tail.block])

    def release(self, lease_id: Hashable) -> None:
        """End the leases of one inner prompt of one tenant."""
        for tail in [tail for tail in self.leases.values() if tail.lease_id == lease_id]:
            self.end(tail)

    def expire(self) -> None:
        """End the leases whose time is over."""
        now = self.clock()
        for tail in [tail for tail in self.leases.values() if tail.expires <= now]:
            self.end(tail)

    def _unpin_tail(self, tail: Tail) -> None:
        self.pool.unpin_blocks([tail.block], lambda _: self._forget(tail))

    def _forget(self, tail: Tail) -> None:
        if not tail.alive:
            return
        tail.alive = False
        for name in tail.names:
            del self.tails[name][tail.block.block_id]
            if not self.tails[name]:
                del self.tails[name]
        del self.by_block[tail.block.block_id]
        self.leases.pop(tail.block.block_id, None)
