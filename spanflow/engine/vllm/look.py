"""What a request would find if it ran now, before all others: a look at the pool that changes nothing there."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from spanflow.engine.assembly import behind
from spanflow.engine.context import in_context
from spanflow.engine.payload import Ask
from spanflow.engine.vllm.contract import BlockHash
from spanflow.engine.vllm.state import SourceState, SpanRequest

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver


def look(spans: Resolver, state: SpanRequest) -> None:
    """Let the report of a request say what it would find, and what would be computed: with it in `answers["look"]`."""
    # Sources that would be made, and the hashes of their blocks: later ones find them.
    made, blocks = set[Hashable](), set[BlockHash]()
    _, todo = _cost(spans, state, state.request.block_hashes, made, blocks)
    todo.reverse()
    while todo:
        source = todo[-1]
        nested = SpanRequest(state.request, Ask(), source.prompt, make=state.make, keys=state.keys)
        if source.prompt.spans:
            nested.plan(spans.hashing)
        computed, missing = _cost(spans, nested, source.keys.full, made, blocks)
        if missing:  # they are made before it
            todo += reversed(missing)
            continue
        todo.pop()
        blocks.update(source.keys.full)
        state.internal_tokens += computed
    state.answers["look"], _ = _cost(spans, state, state.request.block_hashes, made, blocks)


def _cost(
    spans: Resolver, state: SpanRequest, hashes: Sequence[BlockHash], made: set[Hashable], blocks: set[BlockHash]
) -> tuple[int, list[SourceState]]:
    """How many tokens of a prompt are computed in its own pass, and the sources to be made before: `made` from now."""
    prompt, size, num_cached = state.prompt, spans.block_size, 0
    for block_hash in hashes[: (len(prompt) - 1) // size]:
        if block_hash not in blocks and spans.residency.cached([block_hash]) is None:
            break
        num_cached += size
    if state.assembly is None:
        return len(prompt) - num_cached, []
    todo, found = spans.find(state, behind(state.assembly, num_cached))
    sources = [state.source(segment) for segment in todo.segments]
    is_there = [bool(item) or source.keys.key in made for source, item in zip(sources, found, strict=True)]
    if spans.lacks_only_its_head(state, todo, is_there):
        todo, sources, found = replace(todo, segments=todo.segments[1:]), sources[1:], found[1:]
    flags = in_context(prompt)
    missing = []
    for segment, source, item in zip(todo.segments, sources, found, strict=True):
        source.status = source.status or spans.status(source, item)
        # What is made has what it brings.
        flags[(segment if item else segment.widened()).start : segment.end] = False
        if not item and source.keys.key not in made:
            made.add(source.keys.key)
            missing.append(source)
    return int(flags[num_cached:].sum()), missing
