"""Block hashes that know of spans.

Blocks that end before the first span hash as in any request, so they are shared. A block that holds
a part of a span carries the span's fingerprint, and the chain carries it on: assembled KV is never
taken for the KV of full attention, and two assemblies share what is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from spanflow.engine.vllm.contract import BlockHash, Request, generate_block_hash_extra_keys, hash_block_tokens
from spanflow.lowering.prompt import Span, SpanPrompt

HashFn = Callable[[Any], bytes]


def fingerprint(spans: Sequence[Span], start: int, end: int) -> bytes | None:
    """What the KV of tokens `[start, end)` depends on besides tokens and prefix, or None."""
    touching = [span for span in spans if span.start < end and start < span.end]
    if not touching:
        return None
    hasher = blake2b(digest_size=16)
    for span in touching:
        taken = -1 if span.num_taken is None else span.num_taken
        hasher.update(b"%d,%d,%d,%d;" % (span.start, span.end, span.repair, taken) + span.anchor.digest)
    return hasher.digest()


def _extra_keys(request: Request, spans: Sequence[Span], start: int, end: int) -> tuple[Any, ...] | None:
    keys, _ = generate_block_hash_extra_keys(request, start, end, 0)
    mark = fingerprint(spans, start, end)
    return keys if mark is None else (*(keys or ()), ("spanflow", mark))


class BlockHasher:
    """Hashes a request's new full blocks, as `Request._block_hasher` wants it, under the spans of its prompt."""

    def __init__(self, block_size: int, hash_fn: HashFn, spans: tuple[Span, ...]) -> None:
        self.block_size = block_size
        self.hash_fn = hash_fn
        self.spans = spans

    def __call__(self, request: Request) -> list[BlockHash]:
        """The hashes of the full blocks that the request has no hash for yet."""
        done = len(request.block_hashes)
        parent = request.block_hashes[-1] if done else None
        return chain(request, request.all_token_ids, self.spans, self.block_size, self.hash_fn, done, parent)


def chain(
    tenant: Request,
    tokens: Sequence[int],
    spans: Sequence[Span],
    block_size: int,
    hash_fn: HashFn,
    first_block: int = 0,
    parent: BlockHash | None = None,
) -> list[BlockHash]:
    """The hashes of the full blocks of `tokens` from `first_block` on; salt and adapter are those of `tenant`."""
    hashes: list[BlockHash] = []
    for start in range(first_block * block_size, len(tokens) - block_size + 1, block_size):
        end = start + block_size
        parent = hash_block_tokens(hash_fn, parent, tokens[start:end], _extra_keys(tenant, spans, start, end))
        hashes.append(parent)
    return hashes


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


def tail_key(
    tenant: Request, spans: Sequence[Span], num_kv: int, block_size: int, full: Sequence[BlockHash], hash_fn: HashFn
) -> bytes:
    """The key of an unfilled block behind the `full` ones, its tokens aside."""
    start = num_kv // block_size * block_size
    parent = full[-1] if full else None
    return hash_fn((parent, "tail", _extra_keys(tenant, spans, start, num_kv)))


def source_keys(tenant: Request, prompt: SpanPrompt, block_size: int, hash_fn: HashFn) -> SourceKeys:
    """The keys of a source; salt and adapter are those of `tenant`."""
    tokens, spans = prompt.token_ids, prompt.spans
    full = chain(tenant, tokens, spans, block_size, hash_fn)
    tail = tokens[len(full) * block_size :]
    key = tail_key(tenant, spans, len(tokens), block_size, full, hash_fn) if tail else b""
    return SourceKeys(tuple(full), key, tail)
