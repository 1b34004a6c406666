"""Which KV would be resident: prefix cache, span sources, leases and evictions, in blocks and without tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spanflow.engine.assembly import Segment, assemble, source_maker
from spanflow.engine.blocks import BlockPool, PoolFull, block_keys
from spanflow.engine.context import (
    computed_whole,
    count_span,
    effective,
    in_context,
    stands_where_sampled,
)
from spanflow.engine.leases import Held, LeaseBook, tenant
from spanflow.engine.protocol import EngineRequest, SpanReport, SpanStatus
from spanflow.lowering.prompt import Span, SpanPrompt


@dataclass(slots=True)
class Admission:
    """One admitted request: its blocks, one report a span, and tokens of the prompt.

    `computed` by its own pass, `cached` from KV (they add up to the prompt), `internal` computed for it by
    materialising what was missing.
    """

    request: EngineRequest
    prompt: SpanPrompt
    blocks: list[int]
    spans: tuple[SpanReport, ...]
    computed: int
    cached: int
    internal: int


@dataclass(slots=True)
class _Pass:
    """What one resolved prompt came to; `status` per source."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    internal: int = 0
    status: dict[bytes, SpanStatus] = field(default_factory=dict)
    leases: list[Held[list[int]]] = field(default_factory=list)


#: What makes a prompt: it yields what is to be made before it goes on.
_Steps = Generator["_Steps", None, None]


class Residency:
    """The cache of an engine with `num_blocks` blocks of `block_size` tokens.

    A missing span is computed behind its anchor, and so is the head before the first span; where nothing else is
    missing, the head is computed with its prompt. Found again are full blocks, and of what was computed for a span, or
    is leased, the last block too. A prompt reserves the blocks of its answer when it is admitted. Copies of spans
    inside assembled prompts are evicted before anything else that is cached.
    """

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, clock: Callable[[], float]) -> None:
        self.block_size = block_size
        self.max_model_len = max_model_len
        self._clock = clock
        self.pool = BlockPool(num_blocks)
        self.leases: LeaseBook[list[int]] = LeaseBook(self._free, clock)
        self.running: dict[str, Admission] = {}
        self._known: set[tuple[Hashable, bytes]] = set()
        self._heads: dict[tuple[Hashable, bytes], bytes] = {}  # the keys of blocks of prompts in which heads end
        self._tried: dict[str, _Pass] = {}  # what was made for requests that are still not admitted

    def copy(self) -> Residency:
        """An independent residency in the same state."""
        new = Residency(0, self.block_size, self.max_model_len, self._clock)
        new.pool = self.pool.copy()
        new.leases = self.leases.copy(new._free)
        new.running, new._known, new._heads = self.running.copy(), self._known.copy(), self._heads.copy()
        new._tried = {
            request_id: replace(tried, status=tried.status.copy()) for request_id, tried in self._tried.items()
        }
        return new

    def admit(self, request: EngineRequest, room: int) -> Admission:
        """Find, compute and assemble the KV of a prompt, with `room` tokens for its answer. Raises PoolFull."""
        return self._admit(request, room, {})

    def admit_alone(self, request: EngineRequest, room: int) -> Admission:
        """Like `admit` where no running request will give blocks back: ends leases, then gives up on spans."""
        while True:
            try:
                return self._admit(request, room, {})
            except PoolFull as full:
                if self.leases.end_oldest() is None:
                    why = f"span and prompt do not fit into the pool together ({full}); raise its size"
                    return self._admit(request, room, dict.fromkeys(request.prompt.spans, why))

    def withdraw(self, request_id: str) -> None:
        """A request that was not admitted gives up."""
        self._tried.pop(request_id, None)

    def finish(self, admission: Admission, sampled: tuple[int, ...] = (), *, is_source: bool = False) -> None:
        """End a request with what it sampled; its full blocks stay to be found, all of them where it is leased, or
        where spans will be taken from it."""
        request, size = admission.request, self.block_size
        del self.running[request.request_id]
        tokens = admission.prompt.followed_by(sampled[:-1])
        self._register(tenant(request), tokens, admission.blocks, 0 if is_source else None)
        if request.lease is not None and sampled:
            kept = -(-len(tokens) // size)
            self._known.add((tenant(request), tokens.digest))
            self.leases.add(request, request.lease, sampled, admission.blocks[:kept])
            self.pool.free(admission.blocks[kept:])
        else:
            self.pool.free(admission.blocks)

    def abandon(self, admission: Admission) -> None:
        """End a request that was left: its blocks are free, the prompt's full ones can still be found."""
        del self.running[admission.request.request_id]
        self.pool.free(admission.blocks)

    def reset(self) -> None:
        """Forget what is cached and all leases, but not what was here once; running requests keep their blocks."""
        self.leases.clear()
        self._heads.clear()
        self.pool.forget()

    def problems(self) -> list[str]:
        """What is wrong in the books; must be empty."""
        holders = [admission.blocks for admission in self.running.values()]
        return self.pool.problems([*holders, *self.leases.payloads()])

    def _free(self, blocks: list[int]) -> None:
        self.pool.free(blocks)

    def _admit(self, request: EngineRequest, room: int, refused: dict[Span, str]) -> Admission:
        owner, prompt = tenant(request), request.prompt
        if why := self._too_long(prompt):
            refused = dict.fromkeys(prompt.spans, why)
        served = _without(prompt, refused)
        done = self._tried.pop(request.request_id, _Pass())
        try:
            self._resolve(owner, served, room, done)
        except PoolFull:
            tried = self._tried[request.request_id] = _Pass(internal=done.internal)
            tried.status.update((source, status) for source, status in done.status.items() if status != "hit")
            raise
        for held in done.leases:
            self.leases.consume(held, request.request_id)
        found = {
            served.spans[s.span]: done.status.get(s.source.digest, "hit") for s in _segments(served) if s.span >= 0
        }
        reports = tuple(_report(prompt, span, refused, found) for span in prompt.spans)
        cached = len(prompt) - done.computed
        admission = Admission(request, served, done.blocks, reports, done.computed, cached, done.internal)
        self.running[request.request_id] = admission
        return admission

    def _resolve(self, owner: Hashable, prompt: SpanPrompt, room: int, done: _Pass) -> None:
        """Give a prompt its blocks. What its sources are assembled of is made before them, however deep that goes."""
        steps = [self._resolving(owner, prompt, room, None, done)]
        full: PoolFull | None = None
        while steps:
            try:
                steps.append(steps[-1].throw(full) if full else next(steps[-1]))
            except StopIteration:
                steps.pop()
            except PoolFull as error:
                steps.pop()
                full = error
        if full:
            raise full

    def _resolving(self, owner: Hashable, prompt: SpanPrompt, room: int, keep_from: int | None, done: _Pass) -> _Steps:
        """Prefix hits, then moves from sources, the rest computed.

        `keep_from`: for internal prompts, the block from which on they are sources and no copies.
        """
        size = self.block_size
        hits: list[int] = []
        keys = block_keys(owner, prompt, size)[: (len(prompt) - 1) // size]
        self._adopt(keys, hits)
        pinned: list[int] = []
        try:
            missing = []
            segments = _segments(prompt)
            for segment in segments:
                if segment.end > len(hits) * size:
                    found = self._find_source(owner, prompt, segment, done)
                    pinned += found or []
                    missing += [] if found else [segment]
            lacks_only_its_head = len(missing) == 1 and missing[0].span < 0
            for segment in [] if lacks_only_its_head else missing:  # behind the others, which are safe by now
                found = self._find_source(owner, prompt, segment, done)
                pinned += found or []
                if not found:
                    yield self._making_source(owner, segment, done, pinned)
            self._adopt(keys, hits)  # a source behind its beginning may have made some
            moved = [self._moved(owner, prompt, segment) for segment in segments[lacks_only_its_head:]]
            total = -(-(len(prompt) + room) // size)
            done.blocks = hits + self.pool.take(total - len(hits))
        except PoolFull:
            self.pool.free(hits)
            raise
        finally:
            self.pool.free(pinned)
        flags = in_context(prompt, last=keep_from is None)
        for start, end in moved:
            flags[start : min(end, len(prompt) - (keep_from is None))] = False
        done.computed = int(flags[len(hits) * size :].sum())
        self._register(owner, prompt, done.blocks, keep_from)

    def _adopt(self, keys: Sequence[bytes], hits: list[int]) -> None:
        """Add to a prompt's prefix hits those behind them, pinned."""
        for key in keys[len(hits) :]:
            block = self.pool.find(key)
            if block is None:
                return
            self.pool.touch([block])
            hits.append(block)

    def _find_source(self, owner: Hashable, prompt: SpanPrompt, segment: Segment, done: _Pass) -> list[int] | None:
        """The blocks that a segment is moved from, pinned, or None where some are missing."""
        blocks, held = self._blocks_of(owner, prompt, segment)
        if blocks is None and segment.span < 0 and stands_where_sampled(prompt, 0):
            _, answer, *_ = _segments(prompt)
            blocks, _ = self._blocks_of(owner, prompt, replace(segment, source=answer.source, span=0))
        if blocks is None:
            return None
        done.leases += [held] if held else []
        done.status.setdefault(segment.source.digest, "hit")
        self._known.add((owner, segment.source.digest))
        self.pool.touch(blocks)
        for block in blocks:
            self.pool.keep(block)
        return blocks

    def _blocks_of(
        self, owner: Hashable, prompt: SpanPrompt, segment: Segment
    ) -> tuple[list[int] | None, Held[list[int]] | None]:
        """The blocks that a segment is moved from, or None where some are missing, and the lease that holds them."""
        source, size = segment.source, self.block_size
        first, last = segment.source_start // size, -(-(segment.source_start + segment.end - segment.start) // size)
        held = self.leases.find(owner, prompt, prompt.spans[segment.span]) if segment.span >= 0 else None
        if held is not None:
            return held.payload[first:last], held
        keys = block_keys(owner, source, size, tail=True)[first:last]
        if self.pool.find(keys[-1]) is None and segment.span < 0:
            keys[-1] = self._heads.get((owner, source.digest), keys[-1])
        blocks = [block for key in keys if (block := self.pool.find(key)) is not None]
        return (blocks if len(blocks) == len(keys) else None), None

    def _moved(self, owner: Hashable, prompt: SpanPrompt, segment: Segment) -> tuple[int, int]:
        """Which positions come from a segment's source: what it brings too, where that is there."""
        wide = segment.widened()
        blocks, _ = self._blocks_of(owner, prompt, wide)
        return (segment.start if blocks is None else wide.start), segment.end

    def _making_source(self, owner: Hashable, segment: Segment, done: _Pass, pinned: list[int]) -> _Steps:
        """Compute a missing source behind its anchor, and add its blocks to what is pinned."""
        source, first = segment.source, segment.source_start // self.block_size
        known = (owner, source.digest) in self._known
        made = _Pass()
        try:
            yield self._resolving(owner, source, 0, first, made)
        finally:
            done.internal += made.computed + made.internal
        done.status[source.digest] = "evicted" if known else "new"
        blocks = made.blocks[first:]
        self.pool.touch(blocks)
        self.pool.free(made.blocks)
        self._known.add((owner, source.digest))
        pinned += blocks

    def _too_long(self, prompt: SpanPrompt) -> str:
        """Why the source of a span cannot be made, or ''."""
        num_tokens = max((len(segment.source) for segment in _segments(prompt)), default=0)
        if num_tokens < self.max_model_len:
            return ""
        return f"a span behind its anchor has {num_tokens} tokens, too many for the window of {self.max_model_len}"

    def _register(self, owner: Hashable, prompt: SpanPrompt, blocks: list[int], keep_from: int | None) -> None:
        size = self.block_size
        assembled_from = prompt.spans[0].start if prompt.spans else len(prompt)
        keys = block_keys(owner, prompt, size, tail=keep_from is not None)
        if keep_from is None and prompt.spans and assembled_from % size and assembled_from // size < len(keys):
            self._heads[owner, _segments(prompt)[0].source.digest] = keys[assembled_from // size]
        for index, key in enumerate(keys):
            is_copy = (index + 1) * size > assembled_from and (keep_from is None or index < keep_from)
            self.pool.register(blocks[index], key, is_copy=is_copy)


def _segments(prompt: SpanPrompt) -> list[Segment]:
    """What is moved into a prompt: its KV must be there before it is assembled."""
    prompt = effective(prompt)
    if not prompt.spans:
        return []
    return [segment for segment in assemble(prompt, source_maker()).segments if segment.start < segment.end]


def _without(prompt: SpanPrompt, refused: dict[Span, str]) -> SpanPrompt:
    """The prompt without the spans that are refused, and without those of which nothing would be moved."""
    kept = tuple(span for span in prompt.spans if span not in refused)
    return effective(SpanPrompt(prompt.token_ids, kept) if refused else prompt)


def _report(
    prompt: SpanPrompt, span: Span, refused: Mapping[Span, str], found: Mapping[Span, SpanStatus]
) -> SpanReport:
    if span in refused:
        return SpanReport(span.start, span.end, "unsupported", computed=len(span), why=refused[span])
    if (whole := computed_whole(span)) is not None:
        return whole
    return SpanReport(span.start, span.end, found[span], *count_span(prompt, span))
