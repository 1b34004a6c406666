"""Block hashes that know of spans.

Blocks that end before the first span hash as in any request, so they are shared. A block that holds
a part of a span carries the span's fingerprint, and the chain carries it on: assembled KV is never
taken for the KV of full attention, and two assemblies share what is the same in both.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from spanflow.engine.vllm.contract import BlockHash, Request, generate_block_hash_extra_keys, hash_block_tokens
from spanflow.lowering.prompt import Span, SpanPrompt

HashFn = Callable[[Any], bytes]


def _extra_keys(request: Request, spans: Sequence[Span], start: int, end: int) -> tuple[Any, ...] | None:
    """What the KV of tokens `[start, end)` depends on besides tokens and prefix: vLLM's keys, and the fingerprint."""
    keys: tuple[Any, ...] | None
    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    first = bisect_right(spans, start, key=lambda span: span.end)
    touching = spans[first : bisect_left(spans, end, key=lambda span: span.start)]
    if not touching:
        return keys
    hasher = blake2b(digest_size=16)
    for span in touching:
        taken = -1 if span.num_taken is None else span.num_taken
        hasher.update(b"%d,%d,%d,%d;" % (span.start, span.end, span.repair, taken) + span.anchor.digest)
    return (*(keys or ()), ("spanflow", hasher.digest()))


@dataclass(frozen=True, slots=True)
class SourceKeys:
    """How the KV of a source is found: `full` are the hashes of the blocks it fills; `tail` are the tokens behind
    them, in a block that it does not fill and that `tail_key` (salt, adapter, spans and prefix) leads to."""

    full: tuple[BlockHash, ...]
    tail_key: bytes
    tail: tuple[int, ...]

    @property
    def key(self) -> tuple[bytes, tuple[int, ...]]:
        """The name of the source: equal for equal tokens, spans, salt and adapter."""
        return self.tail_key or self.full[-1], self.tail


#: Those of nothing.
NO_KEYS = SourceKeys((), b"", ())


class Hashing:
    """How one engine hashes its blocks. `tenant` is a request of the salt and adapter that are wanted."""

    def __init__(self, block_size: int, hash_fn: HashFn) -> None:
        self.block_size = block_size
        self.hash_fn = hash_fn

    def hasher(self, spans: Sequence[Span], full: Sequence[BlockHash] = ()) -> Callable[[Request], list[BlockHash]]:
        """Hashes a request's new full blocks, as `Request._block_hasher` wants it, under the spans of its prompt.

        `full` are the hashes of all that its prompt fills, where they are known.
        """

        def hash_new(request: Request) -> list[BlockHash]:
            done = request.block_hashes
            return self.chain(request, request.all_token_ids, spans, done) if done or not full else [*full]

        return hash_new

    def chain(
        self, tenant: Request, tokens: Sequence[int], spans: Sequence[Span], done: Sequence[BlockHash]
    ) -> list[BlockHash]:
        """The hashes of the full blocks of `tokens` behind those that are `done`."""
        hashes: list[BlockHash] = []
        parent, size = done[-1] if done else None, self.block_size
        for start in range(len(done) * size, len(tokens) - size + 1, size):
            extra = _extra_keys(tenant, spans, start, start + size)
            parent = hash_block_tokens(self.hash_fn, parent, tokens[start : start + size], extra)
            hashes.append(parent)
        return hashes

    def tail_key(self, tenant: Request, spans: Sequence[Span], num_kv: int, full: Sequence[BlockHash]) -> bytes:
        """The key of an unfilled block behind the `full` ones, its tokens aside."""
        start = num_kv // self.block_size * self.block_size
        return self.hash_fn((full[-1] if full else None, "tail", _extra_keys(tenant, spans, start, num_kv)))

    def source_keys(self, tenant: Request, prompt: SpanPrompt, done: Sequence[BlockHash] = ()) -> SourceKeys:
        """The keys of a source, the first of whose full blocks are `done`."""
        tokens, spans = prompt.token_ids, prompt.spans
        full = (*done, *self.chain(tenant, tokens, spans, done))
        tail = tokens[len(full) * self.block_size :]
        return SourceKeys(full, self.tail_key(tenant, spans, len(tokens), full) if tail else b"", tail)
