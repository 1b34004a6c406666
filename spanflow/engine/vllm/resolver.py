"""Resolving: from a waiting request with spans to moves, ranges and a place in vLLM's queue.

For each waiting span request, in the queue's order: are all its sources in the pool, in blocks that
earlier steps wrote? If not, what is missing is materialised by internal requests put at its place.
If so, the sources are pinned, the request's blocks allocated, its moves queued for the start of this
step, and its ranges made virtual requests ahead of it on the queue of block holders.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from spanflow.engine.assembly import Assembly, behind, widened, with_head_in_context
from spanflow.engine.children import end_with_parent
from spanflow.engine.payload import Ask
from spanflow.engine.protocol import SpanStatus
from spanflow.engine.vllm.admission import give_up_stuck, tenant
from spanflow.engine.vllm.assembler import Assembler
from spanflow.engine.vllm.connector import SpanConnector
from spanflow.engine.vllm.contract import (
    KVCacheBlock,
    KVCacheManager,
    PauseState,
    Request,
    RequestStatus,
    SchedulerOutput,
    get_hash_fn_by_name,
)
from spanflow.engine.vllm.copies import Copies, Found
from spanflow.engine.vllm.families import Families
from spanflow.engine.vllm.hashing import Hashing
from spanflow.engine.vllm.metrics import Reporter
from spanflow.engine.vllm.probe import Probe
from spanflow.engine.vllm.reserve import Reserve
from spanflow.engine.vllm.residency import Residency
from spanflow.engine.vllm.spawn import internal_request, pull_before, queue_before
from spanflow.engine.vllm.state import Family, Internal, SourceState, SpanRequest
from spanflow.engine.vllm.support import unsupported
from spanflow.lowering.prompt import SpanPrompt

if TYPE_CHECKING:
    from spanflow.engine.vllm.scheduler import SpanScheduler


class Resolver:
    """The span scheduler's state: known and held requests, internal ones, families, leases and pins."""

    def __init__(self, scheduler: SpanScheduler, connector: SpanConnector) -> None:
        config = scheduler.vllm_config
        extra = config.kv_transfer_config.kv_connector_extra_config
        self.scheduler = scheduler
        self.connector = connector
        self.manager: KVCacheManager = scheduler.kv_cache_manager
        self.block_size = scheduler.block_size
        self.num_blocks = self.manager.block_pool.num_gpu_blocks - 1
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        self.hashing = Hashing(self.block_size, hash_fn)
        self.headers = {(), *map(tuple, extra.get("headers", ()))}
        self.unsupported = unsupported(config, scheduler.kv_cache_config)
        if not self.unsupported and scheduler.hash_block_size != scheduler.block_size:
            self.unsupported = f"its blocks of {scheduler.block_size} are hashed by {scheduler.hash_block_size} tokens"
        self.audit_steps = bool(extra.get("audit_steps"))
        if extra.get("own_process"):
            end_with_parent()
        self.residency = Residency(self.manager.block_pool)
        self.copies = Copies(self.manager.block_pool, self.residency.by_block)
        self.known: dict[str, SpanRequest] = {}
        self.held: dict[str, SpanRequest] = {}
        self.internal: dict[str, Internal | Family] = {}
        connector.internal = self.internal
        self.by_source: dict[object, str] = {}
        self.ended: set[str] = set()
        self.family = Families(self)
        self.assembler = Assembler(self)
        self.probe = Probe(self)
        self.counters: Counter[str] = Counter()
        connector.counters = self.counters
        connector.reporter = Reporter(self.counters)
        self.reserve = Reserve(self)

    def pinned(self) -> list[KVCacheBlock]:
        """Blocks that hold a reference of ours."""
        return self.assembler.pins + self.reserve.blocks

    # Coming and going.

    def hold(self, state: SpanRequest) -> None:
        """Keep a request from vLLM's own path until it is resolved."""
        self.held[state.request.request_id] = state
        self.connector.held.add(state.request.request_id)

    def root(self, name: str) -> SpanRequest | None:
        """The caller's request that an internal one works for; of several one, and none where nobody waits any more."""
        while isinstance(internal := self.internal.get(name), Internal):
            if not internal.waiters:
                return None
            name = min(internal.waiters)
        return self.known.get(name)

    def let_go(self, name: str) -> None:
        """A request is held no more, and waits for sources no more."""
        self.held.pop(name, None)
        self.connector.held.discard(name)
        self.reserve.gone(name)
        for internal in self.internal.values():
            if isinstance(internal, Internal):
                internal.waiters.discard(name)

    def refuse(self, request: Request) -> None:
        """Let a request fail by itself: vLLM finishes the requests of this set with an error in its next update."""
        self.connector.held.add(request.request_id)
        self.scheduler.grammar_compile_error_reqs.add(request.request_id)

    def dependents(self, names: set[str]) -> set[str]:
        """What was spawned for these requests alone: members of their families, sources nobody else waits for."""
        out: set[str] = set()
        gone = set(names)
        families = self.family.waiting
        while True:
            more = {member for name in gone & families.keys() for member in families[name].members}
            more |= {
                name
                for name, internal in self.internal.items()
                if isinstance(internal, Internal) and internal.waiters and internal.waiters <= gone
            }
            more &= self.scheduler.requests.keys()
            if more <= out:
                return out
            out |= more
            gone |= more

    def gone(self, request: Request) -> None:
        """A request's blocks are freed: it is finished."""
        name = request.request_id
        self.let_go(name)
        state = self.known.get(name)
        if state is not None and not state.ask.look:
            self._consume_leases(state)
        self.family.parent_gone(name)
        internal = self.internal.get(name)
        source = internal.source if isinstance(internal, Internal) else state.makes if state is not None else None
        if self.by_source.get(source) == name:
            del self.by_source[source]
        if state is not None or internal is not None:
            self.ended.add(name)

    def sweep(self) -> None:
        """Forget what has ended, once its outputs are on their way."""
        for name in self.ended - self.scheduler.requests.keys():  # else a new request came by the name of an old one
            self.known.pop(name, None)
            self.internal.pop(name, None)
        self.ended.clear()

    def assembled(self, request: Request) -> list[KVCacheBlock]:
        """The blocks behind the head of a request that is mostly moved KV; before they are freed, in their order of
        eviction. What it took over is found there from now on."""
        state = self.known.get(request.request_id)
        if state is None or state.assembly is None or request.request_id in self.internal:
            return []
        blocks = self.manager.get_blocks(request.request_id).blocks[0]
        self.assembler.relocate(state, blocks)
        if state.ask.lease is not None:
            return []
        # What was computed behind the copies can't be found without them. Where it is more than they are, it is worth
        # as much as any other KV, and so are they.
        first, suffix = -(-state.assembly.segments[0].end // self.block_size), state.assembly.suffix // self.block_size
        return [*reversed(blocks[first:])] if len(blocks) - suffix <= suffix - first else []

    def begin_lease(self, request: Request) -> Callable[[], None] | None:
        """Before a request's blocks are freed: hold its unfilled last block where it is to stay readable.

        Returns what to call once they are freed. Sources keep the tail of their prompt, leases that of their answer.
        """
        state = self.known.get(request.request_id)
        internal = self.internal.get(request.request_id)
        lease = state.ask.lease if state is not None else None
        is_source = isinstance(internal, Internal) or (state is not None and state.ask.keep)
        if self.unsupported or (lease is None and not is_source):
            return None
        num_kv = min(request.num_computed_tokens, request.num_tokens - (0 if lease is None else 1))
        if is_source:
            num_kv = min(num_kv, request.num_prompt_tokens)
        if num_kv < request.num_prompt_tokens:
            return None
        served = state is not None and not state.exact
        spans = state.prompt.spans if state is not None and served else ()
        if is_source:
            prompt = SpanPrompt(tuple(request.prompt_token_ids), spans)
            done = request.block_hashes[: len(prompt) // self.block_size]
            self.residency.seen.keep(self.hashing.source_keys(request, prompt, done).key, None)
        num_full, rest = divmod(num_kv, self.block_size)
        if not rest:
            return None
        key = self.hashing.tail_key(request, spans, num_kv, request.block_hashes[:num_full])
        tokens = tuple(request.all_token_ids[num_full * self.block_size : num_kv])
        block = self.manager.get_blocks(request.request_id).blocks[0][num_full]
        lease_id = None
        if lease is not None and state is not None:
            inner = SpanPrompt(tuple(request.prompt_token_ids), state.ask.spans)
            lease_id = (*tenant(request), inner.digest)
        self.residency.pin([block])
        return lambda: self.residency.keep(key, tokens, block, lease, lease_id)

    def forget(self, families: bool) -> None:
        """Before the cache is reset: no pin, and if asked no family stays. Of tails and leases vLLM's reset tells."""
        self.reserve.release()
        if families:
            self.family.fall_all()

    def preempted(self, request: Request) -> None:
        """A preempted member brings its family down; a preempted span request is resolved again."""
        self.counters["preemptions"] += 1
        state = self.known.get(request.request_id)
        if self.family.preempted(request.request_id):
            return
        if state is not None and state.assembly is not None:
            state.num_made = 0  # It ran: its sources did fit.
            self.hold(state)

    def unregister_unwritten(self, request: Request) -> None:
        """A request that is preempted in the step that scheduled it leaves hashes on blocks nobody will write."""
        kinds, done = self.manager.coordinator.single_type_managers, request.num_computed_tokens
        tables = [kind.req_to_blocks.get(request.request_id, [])[done // kind.block_size :] for kind in kinds]
        unwritten = {block.block_id for table in tables for block in table if block.block_hash is not None}
        self.manager.block_pool.evict_blocks(unwritten)

    # Each step.

    def resolve(self) -> None:
        """Resolve what can be resolved now; spawn what is missing for the rest."""
        self.family.recover()
        self.residency.expire()
        self.probe.step()
        self.reserve.release()
        self.connector.closed = False
        if not self.held:
            return
        scheduler = self.scheduler
        if scheduler.pause_state != PauseState.UNPAUSED:
            return
        give_up_stuck(self)
        seats = scheduler.max_num_active_reqs - len(scheduler.running) - len(scheduler.kv_holding_waiting)
        front, kept, pool = True, self.reserve.wanted_first(), self.manager.block_pool
        for request in list(scheduler.waiting):
            if seats <= 0:
                break
            state = self.held.get(request.request_id)
            if state is None:
                seats -= request.request_id not in self.connector.held
                # What stands first may need the memory that a span request behind it would hold back.
                front = front and request.request_id in self.internal
                if kept < pool.get_num_free_blocks():  # as in vLLM, nobody passes by who waits for memory
                    kept += self.reserve.wanted_by(request)
                continue
            if self.family.is_assembling(state):
                continue
            hits, num_cached, _ = self.manager.get_computed_blocks(request)
            assert state.assembly is not None
            todo, found = self.find(state, behind(state.assembly, num_cached))
            self._note(state, todo, found)
            if self.lacks_only_its_head(state, todo, found):
                if self.family.is_making_head(state):
                    continue
                todo, found = with_head_in_context(todo, num_cached), found[1:]
            if all(found) and self.assembler.assemble(state, todo, hits, num_cached, found, front, kept):
                self._admitted(state, todo)
                seats -= 1
                continue
            is_stuck = all(found) or self._spawn_missing(state, todo, found, front)
            if front:
                self.reserve.hold_back(state, found, is_stuck)
            if all(found) or (front and self.connector.closed):
                return
            front = False

    def make_way(self) -> None:
        """Before vLLM schedules: as many blocks as it may hand out in one step are to hold copies, not sources."""
        scheduler = self.scheduler
        num_prefilled = scheduler.max_num_scheduled_tokens // self.block_size if scheduler.waiting else 0
        self.copies.make_way(num_prefilled + len(scheduler.running))
        self.reserve.yield_to_running()

    def scheduled(self, output: SchedulerOutput) -> None:
        """After vLLM scheduled: the moves are on their way, so pins end; families are checked."""
        self.residency.unpin(self.assembler.take_pins())
        self.family.scheduled(output)
        self.counters["scheduled_tokens"] += output.total_num_scheduled_tokens
        if self.audit_steps and (problems := self.scheduler.audit()["problems"]):
            raise AssertionError("; ".join(problems))

    def find(self, state: SpanRequest, todo: Assembly) -> tuple[Assembly, list[Found | None]]:
        """Where the KV of each segment is, with what it brings where that is there too."""
        locate, found = self.assembler.locate, list[Found | None]()
        for number, segment in enumerate(todo.segments):
            item = locate(segment, state.source(segment))
            if item is None and segment.span < 0 and todo.continues:
                item = locate(segment, state.sources[1])
            if segment.brings and item is not None:
                wide = widened(todo, number)
                more = locate(wide.segments[number], state.source(segment))
                todo, item = (wide, more) if more else (todo, item)
            found.append(item)
        return todo, found

    def lacks_only_its_head(self, state: SpanRequest, todo: Assembly, found: Sequence[object]) -> bool:
        """Whether nothing is missing but the head: then it is computed together with the rest, not by a step before."""
        is_missing = bool(found) and not found[0] and todo.segments[0].span < 0 and all(found[1:])
        # vLLM may put a request of another adapter back into its queue by what it has computed, which is nothing.
        return is_missing and state.request.lora_request is None

    def status(self, source: SourceState, found: Found | None) -> SpanStatus:
        """Whether a source that is looked for is here, is new, or was evicted."""
        key = source.keys.key  # under way for somebody else it is as new as for them
        evicted = key in self.residency.seen and key not in self.by_source
        return "hit" if found else "evicted" if evicted else "new"

    def _note(self, state: SpanRequest, todo: Assembly, found: list[Found | None]) -> None:
        """Say, once for each source, whether it was here, is new, or was evicted."""
        noted = []
        for segment, blocks in zip(todo.segments, found, strict=True):
            source = state.source(segment)
            if source.status is None:
                source.status = self.status(source, blocks)
                noted.append(source.keys.key)
        for key in noted:  # Not before: a span that stands twice in a prompt is new in both places.
            self.residency.seen.keep(key, None)

    def _spawn_missing(self, state: SpanRequest, todo: Assembly, found: list[Found | None], front: bool) -> bool:
        """An internal request for each missing source, as many as can run, unless one is under way, or a prefetch of
        it, or a prompt with the same head. Whether one of these requests waits as well.

        A source that was made for this request and lost again is made anew only when the request is the
        first in the queue (which keeps it): two requests must not evict each other's sources for ever.
        """
        is_stuck = False
        missing = [segment for segment, blocks in zip(todo.segments, found, strict=True) if blocks is None]
        for segment in missing[: self.scheduler.max_num_active_reqs]:
            source = state.source(segment)
            if segment.span < 0 and self.family.is_making_head(state):
                continue
            # Text behind a beginning of this prompt is assembled of the spans in that, which are made before it.
            if len(source.prompt.spans) > max(missing[0].span, 0) and not state.prompt.spans[segment.span].is_generated:
                continue
            name = self.by_source.get(source.keys.key)
            if name is not None:
                internal, making = self.internal.get(name), self.scheduler.requests[name]
                if isinstance(internal, Internal):  # else a prefetch, which nobody's end may end
                    internal.waiters.add(state.request.request_id)
                is_stuck |= making.status != RequestStatus.RUNNING
                if front:  # It may stand behind others, for whom the memory is missing that this one holds back.
                    pull_before(self.scheduler, making, state.request)
            elif front or not source.spawned:
                source.spawned = True
                self._spawn(state, source)
        return is_stuck

    def _spawn(self, state: SpanRequest, source: SourceState) -> None:
        parent, prompt = state.request, source.prompt
        self.counters["sources"] += 1
        name = f"spanflow-source-{self.counters['sources']}"
        hasher = self.hashing.hasher(prompt.spans, source.keys.full)
        request = internal_request(name, prompt.token_ids, parent, hasher)
        self.internal[name] = Internal(request, source.keys.key, {parent.request_id})
        state.num_made += 1
        if (root := self.root(name)) is not None and root is not state:
            root.num_made += 1
        self.by_source[source.keys.key] = name
        if prompt.spans:
            nested = SpanRequest(request, Ask(spans=prompt.spans), prompt, make=state.make, keys=state.keys)
            self.known[name] = nested
            nested.plan(self.hashing)
            self.hold(nested)
        queue_before(self.scheduler, request, parent)

    def _admitted(self, state: SpanRequest, todo: Assembly) -> None:
        """A request has its blocks, and its moves are queued: hand it and its ranges to vLLM."""
        self.let_go(state.request.request_id)
        state.num_starved = 0
        self._count(state)
        self.family.start(state, todo.ranges)

    def _count(self, state: SpanRequest) -> None:
        """What became of each span, once: not before it is served, since a request may be given up until then."""
        for source in state.sources[1:]:
            if not source.is_counted:
                source.is_counted = True
                # What was found assembled was not looked for.
                self.counters["hits" if source.status in (None, "hit") else "misses"] += 1
                self.counters["evicted"] += source.status == "evicted"

    def _consume_leases(self, state: SpanRequest) -> None:
        """A finished request is done with the generations that it took over, whether moved or found assembled."""
        for source in state.sources[1:]:  # the head may be read from an answer's block too
            tail = self.residency.tail(source.keys.tail_key, source.keys.tail)
            if tail is not None:
                self.residency.consume(tail)
