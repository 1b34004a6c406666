"""Which KV would be resident: prefix cache, span sources, leases and evictions, in blocks and without tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from dataclasses import dataclass, field, replace

from spanflow.engine.blocks import BlockPool, PoolFull, block_keys
from spanflow.engine.context import computed_whole, count_span, effective, in_context, stands_where_sampled, taken_range
from spanflow.engine.leases import Held, LeaseBook, tenant
from spanflow.engine.protocol import EngineRequest, SpanReport, SpanStatus
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt


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


@dataclass(frozen=True, slots=True)
class _Source:
    """The sequence that a span, or the head, is taken from: `prompt` all of whose tokens have KV.

    Positions `[start, end)` of the reader come from it, and are in its blocks `[first, last)`.
    """

    span: Span
    prompt: SpanPrompt
    start: int
    end: int
    first: int
    last: int
    is_head: bool = False


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

    def play(self, request: EngineRequest, sampled: tuple[int, ...] = ()) -> Admission:
        """Admit and finish one request, alone: what a plan does with a copy."""
        admission = self.admit_alone(request, max(1, len(sampled)))
        self.finish(admission, sampled)
        return admission

    def reset(self) -> None:
        """Forget what is cached and all leases; running requests keep their blocks."""
        self.leases.clear()
        self._known.clear()
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
        reports = tuple(self._report(prompt, span, refused, done) for span in prompt.spans)
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
        for key in block_keys(owner, prompt, size)[: (len(prompt) - 1) // size]:
            block = self.pool.find(key)
            if block is None:
                break
            hits.append(block)
        self.pool.touch(hits)
        pinned: list[int] = []
        try:
            missing = []
            sources = self._sources(prompt)
            for source in sources:
                if source.end > len(hits) * size:
                    found = self._find_source(owner, prompt, source, done)
                    pinned += found or []
                    missing += [] if found else [source]
            lacks_only_its_head = len(missing) == 1 and missing[0].is_head
            for source in [] if lacks_only_its_head else missing:  # behind the others, which are safe by now
                found = self._find_source(owner, prompt, source, done)
                pinned += found or []
                if not found:
                    yield self._making_source(owner, source, done, pinned)
            total = -(-(len(prompt) + room) // size)
            done.blocks = hits + self.pool.take(total - len(hits))
        except PoolFull:
            self.pool.free(hits)
            raise
        finally:
            self.pool.free(pinned)
        flags = in_context(prompt, last=keep_from is None)
        for source in sources[lacks_only_its_head:]:
            flags[source.start : min(source.end, len(prompt) - (keep_from is None))] = False
        done.computed = int(flags[len(hits) * size :].sum())
        self._register(owner, prompt, done.blocks, keep_from)

    def _find_source(self, owner: Hashable, prompt: SpanPrompt, source: _Source, done: _Pass) -> list[int] | None:
        """The blocks that a span is moved from, pinned, or None where some are missing."""
        held = self.leases.find(owner, prompt, source.span)
        if held is not None:
            done.leases += [] if source.is_head else [held]
            blocks = held.payload[source.first : source.last]
        else:
            keys = block_keys(owner, source.prompt, self.block_size, tail=True)[source.first : source.last]
            if self.pool.find(keys[-1]) is None and source.is_head:
                keys[-1] = self._heads.get((owner, source.prompt.digest), keys[-1])
            blocks = [block for key in keys if (block := self.pool.find(key)) is not None]
            if len(blocks) < len(keys):
                return None
        done.status.setdefault(source.prompt.digest, "hit")
        self._known.add((owner, source.prompt.digest))
        self.pool.touch(blocks)
        for block in blocks:
            self.pool.keep(block)
        return blocks

    def _making_source(self, owner: Hashable, source: _Source, done: _Pass, pinned: list[int]) -> _Steps:
        """Compute a missing source behind its anchor, and add its blocks to what is pinned."""
        known = (owner, source.prompt.digest) in self._known
        made = _Pass()
        try:
            yield self._resolving(owner, source.prompt, 0, source.first, made)
        finally:
            done.internal += made.computed + made.internal
        done.status[source.prompt.digest] = "evicted" if known else "new"
        blocks = made.blocks[source.first :]
        self.pool.touch(blocks)
        self.pool.free(made.blocks)
        self._known.add((owner, source.prompt.digest))
        pinned += blocks

    def _sources(self, prompt: SpanPrompt) -> list[_Source]:
        """What the spans are taken from, and the head before them: its KV too must be there before a span behind it is.

        An answer that stands where it was sampled brings the head, or what stands between it and the span before.
        """
        found: list[_Source] = []
        size, spans = self.block_size, effective(prompt).spans
        for number, span in enumerate(spans):
            start, end = taken_range(span)
            source, first = _source_of(prompt, span), len(span.anchor) // size
            stands = stands_where_sampled(prompt, number)
            if number == 0 and span.start:
                head = Span(0, span.start, NO_ANCHOR)
                whose = (span, source) if stands else (head, _source_of(prompt, head))
                found.append(_Source(*whose, 0, span.start, 0, -(-span.start // size), is_head=True))
            elif stands and not span.repair:
                start = found[-1].end
                first = start // size
            found.append(_Source(span, source, start, end, first, -(-len(source) // size)))
        return found

    def _too_long(self, prompt: SpanPrompt) -> str:
        """Why the source of a span cannot be made, or ''."""
        num_tokens = max((len(source.prompt) for source in self._sources(prompt)), default=0)
        if num_tokens < self.max_model_len:
            return ""
        return f"a span behind its anchor has {num_tokens} tokens, too many for the window of {self.max_model_len}"

    def _register(self, owner: Hashable, prompt: SpanPrompt, blocks: list[int], keep_from: int | None) -> None:
        size = self.block_size
        assembled_from = prompt.spans[0].start if prompt.spans else len(prompt)
        keys = block_keys(owner, prompt, size, tail=keep_from is not None)
        if keep_from is None and prompt.spans and assembled_from % size and assembled_from // size < len(keys):
            head = self._sources(prompt)[0].prompt
            self._heads[owner, head.digest] = keys[assembled_from // size]
        for index, key in enumerate(keys):
            is_copy = (index + 1) * size > assembled_from and (keep_from is None or index < keep_from)
            self.pool.register(blocks[index], key, is_copy=is_copy)

    def _report(self, prompt: SpanPrompt, span: Span, refused: dict[Span, str], done: _Pass) -> SpanReport:
        if span in refused:
            return SpanReport(span.start, span.end, "unsupported", computed=len(span), why=refused[span])
        if (whole := computed_whole(span)) is not None:
            return whole
        moved, repaired, computed = count_span(prompt, span)
        status = done.status.get(_source_of(prompt, span).digest, "hit")
        return SpanReport(span.start, span.end, status, moved, repaired, computed)


def _source_of(prompt: SpanPrompt, span: Span) -> SpanPrompt:
    """All tokens with KV of what a span is taken from."""
    return effective(span.anchor).followed_by(prompt.token_ids[span.start : taken_range(span)[1]])


def _without(prompt: SpanPrompt, refused: dict[Span, str]) -> SpanPrompt:
    """The prompt without the spans that are refused, and without those of which nothing would be moved."""
    kept = tuple(span for span in prompt.spans if span not in refused)
    return effective(SpanPrompt(prompt.token_ids, kept) if refused else prompt)
