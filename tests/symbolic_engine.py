"""The real scheduler on vLLM's real block pool, with a worker that computes no model.

The KV of a token is one number that depends on the token, its position and all KV that it attends to, as in a causal
model. What the engine samples depends on all of it, so a block that is read before it is written, taken for another,
moved to a wrong place or rotated by a wrong angle changes the answer. `expected` says what it must be.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm import AsyncEngineArgs, SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from spanflow.engine.payload import Ask, encode, unpack
from spanflow.engine.protocol import Lease
from spanflow.engine.vllm.arguments import span_arguments
from spanflow.engine.vllm.connector import StepMoves
from spanflow.engine.vllm.scheduler import SpanScheduler
from spanflow.engine.waves import in_waves
from spanflow.kernels.slots import Slots
from spanflow.lowering.prompt import SpanPrompt

VOCABULARY = 1000
_WORD = (1 << 64) - 1
_STALE = 0xDEAD


def _mix(a: int, b: int) -> int:
    """A number that depends on both (splitmix64's finaliser)."""
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & _WORD
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
    return x ^ (x >> 31)


def _attend(attended: int, token: int, position: int) -> int:
    return _mix(_mix(attended, token), position)


def _seen(value: int, position: int) -> int:
    """What one token adds to what later tokens attend to."""
    return _mix(value, position)


def _sample(attended: int, seed: int | None) -> int:
    return (attended if seed is None else _mix(attended, seed)) % VOCABULARY


@cache
def _values(prompt: SpanPrompt) -> tuple[int, ...]:
    """The KV of each token of a prompt as its definition says: spans behind their anchors, the rest in context."""
    moved: dict[int, int] = {}
    for span in prompt.spans:
        anchor = span.anchor
        end = span.end - (1 if span.is_generated else 0)
        alone = _values(SpanPrompt(anchor.token_ids + prompt.token_ids[span.start : end], anchor.spans))
        for at in range(span.start + span.repair, end):
            moved[at] = alone[len(anchor) + at - span.start]
    values: list[int] = []
    attended = 0
    for at, token in enumerate(prompt.token_ids):
        values.append(moved[at] if at in moved else _attend(attended, token, at))
        attended = (attended + _seen(values[at], at)) & _WORD
    return tuple(values)


@cache
def expected(prompt: SpanPrompt, num_tokens: int, seed: int | None = None) -> list[int]:
    """What must be sampled behind a prompt."""
    attended = sum(_seen(value, at) for at, value in enumerate(_values(prompt))) & _WORD
    out: list[int] = []
    for at in itertools.count(len(prompt)):
        out.append(_sample(attended, seed))
        if len(out) == num_tokens:
            return out
        attended = (attended + _seen(_attend(attended, out[-1], at), at)) & _WORD
    raise AssertionError


@dataclass
class _Row:
    """What the worker knows of a request."""

    tokens: list[int]
    blocks: list[int]
    num_computed: int
    num_prompt: int
    seed: int | None


class SymbolicWorker:
    """Runs what the scheduler asks for on a pool of numbers."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.scratch_start = num_blocks * block_size
        self.values = [_STALE] * (self.scratch_start + 2 * block_size)
        self.positions = [-1] * len(self.values)
        self.rows: dict[str, _Row] = {}

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """One step: moves first, then all scheduled tokens, each row's K and V written before anybody attends."""
        self._update(output)
        if output.kv_connector_metadata is not None:
            self._move(output.kv_connector_metadata)
        # Rows that share blocks depend on each other in the order of their positions.
        names = sorted(output.num_scheduled_tokens, key=lambda name: self.rows[name].num_computed)
        sampled = {name: self._forward(self.rows[name], output.num_scheduled_tokens[name]) for name in names}
        order = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(order, {n: i for i, n in enumerate(order)}, [sampled[name] for name in order])

    def _update(self, output: SchedulerOutput) -> None:
        for name in output.finished_req_ids:
            self.rows.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids or ())
            seed = new.sampling_params.seed if new.sampling_params else None
            self.rows[new.req_id] = _Row(tokens, list(new.block_ids[0]), new.num_computed_tokens, len(tokens), seed)
        cached = output.scheduled_cached_reqs
        for name, blocks, num_computed, num_output in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            row = self.rows[name]
            row.num_computed = num_computed
            del row.tokens[row.num_prompt + num_output :]
            if name in cached.resumed_req_ids:
                row.blocks = list(blocks[0]) if blocks else []
                if name in cached.all_token_ids:
                    row.tokens = list(cached.all_token_ids[name])
            elif blocks:
                row.blocks += blocks[0]

    def _move(self, step: StepMoves) -> None:
        waves = [Slots.of(step.moves, self.block_size)]
        if step.in_place:
            waves = in_waves(step.moves, self.block_size, self.scratch_start, 2 * self.block_size)
        for wave in waves:
            pairs = [
                (target + at, source + at, delta)
                for source, target, count, delta in zip(wave.source, wave.target, wave.count, wave.delta, strict=True)
                for at in range(count)
            ]
            written = [target for target, _, _ in pairs]
            assert len(set(written)) == len(written), "two moves of a wave write one slot"
            assert not {source for _, source, _ in pairs} & set(written), "a wave reads what it writes"
            for target, source, delta in pairs:
                self.values[target], self.positions[target] = self.values[source], int(self.positions[source] + delta)

    def _forward(self, row: _Row, num_scheduled: int) -> list[int]:
        size = self.block_size
        attended = 0
        end = row.num_computed + num_scheduled
        for at in range(end):
            slot = row.blocks[at // size] * size + at % size
            if at >= row.num_computed:
                self.values[slot], self.positions[slot] = _attend(attended, row.tokens[at], at), at
            # A key that was rotated to another position than its own changes what attention reads.
            attended = (attended + _seen(self.values[slot], self.positions[slot])) & _WORD
        if end < len(row.tokens):
            return []
        row.tokens.append(_sample(attended, row.seed))
        return [row.tokens[-1]]


@dataclass
class Sent:
    """A request under way or finished."""

    prompt: SpanPrompt
    max_tokens: int
    lease: Lease | None = None
    salt: str | None = None
    seed: int | None = None
    stop: tuple[int, ...] = ()
    tokens: list[int] = field(default_factory=list)
    report: Any = None
    prefill: Any = None
    finished: bool = False
    error: str = ""


@cache
def _config(
    model: str,
    num_blocks: int,
    block_size: int,
    is_async: bool,
    headers: tuple[tuple[int, ...], ...],
    audit_steps: bool,
    stock: bool,
    **options: Any,
) -> Any:
    """vLLM's configuration, which takes longer than all that is done with it."""
    options = {"max_model_len": 512, "max_num_batched_tokens": 256, "max_num_seqs": 16} | options
    spans = {} if stock else span_arguments([list(header) for header in headers], audit_steps=audit_steps)
    config = AsyncEngineArgs(model=model, dtype="float32", **options, **spans).create_engine_config()
    config.cache_config.block_size = block_size
    config.cache_config.num_gpu_blocks = num_blocks
    config.scheduler_config.async_scheduling = is_async
    return config


class SymbolicEngine:
    """Scheduler, pool and symbolic worker. `lag` is how many steps are scheduled before the first one's output; `stock`
    takes vLLM's own scheduler, and no connector. `others` are kinds of KV cache besides the one that the worker has."""

    def __init__(
        self,
        model: Path,
        num_blocks: int = 40,
        block_size: int = 16,
        *,
        lag: int = 0,
        headers: Sequence[Sequence[int]] = (),
        audit_steps: bool = True,
        stock: bool = False,
        others: Sequence[KVCacheSpec] = (),
        **options: Any,
    ) -> None:
        config = _config(
            str(model), num_blocks, block_size, lag > 0, tuple(map(tuple, headers)), audit_steps, stock, **options
        )
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
        groups = [KVCacheGroupSpec([f"layer {number}"], kind) for number, kind in enumerate((spec, *others))]
        cache_config = KVCacheConfig(num_blocks, [], groups)
        scheduler: Any = config.scheduler_config.get_scheduler_cls() if stock else SpanScheduler
        self.scheduler = scheduler(config, cache_config, StructuredOutputManager(config), block_size, log_stats=True)
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(block_size, hash_fn)
        self.worker = SymbolicWorker(num_blocks, block_size)
        self.lag = lag
        self.sent: dict[str, Sent] = {}
        self.steps: list[SchedulerOutput] = []
        self.reported: list[dict[str, Any]] = []
        self._names = itertools.count()
        self._running: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def send(
        self,
        prompt: SpanPrompt,
        max_tokens: int = 1,
        *,
        lease: Lease | None = None,
        salt: str | None = None,
        probe: bool = False,
        keep: bool = False,
        look: bool = False,
        sampling: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """Queue a request; its name. `sampling` are further fields of vLLM's parameters, `options` those of Request."""
        name = f"r{next(self._names)}"
        ask = Ask(spans=prompt.spans, lease=lease, probe=probe, keep=keep, look=look)
        extra = {"spanflow": encode(ask)} if ask != Ask() else None
        wanted = {"temperature": 0.0} | dict(sampling or {})
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra, **wanted)
        params.update_from_generation_config({}, None)
        self.sent[name] = Sent(prompt, max_tokens, lease, salt, params.seed, tuple(params.stop_token_ids or ()))
        request = Request(
            name, list(prompt.token_ids), params, None, cache_salt=salt, block_hasher=self._hasher, **options
        )
        self.scheduler.add_request(request)
        return name

    def step(self) -> None:
        """Schedule and run one step; take the output of the one that is `lag` steps back."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.steps.append(output)
            self._running.append((output, self.worker.run(output)))
        if len(self._running) > self.lag or not self.scheduler.has_unfinished_requests():
            self._take()

    def _take(self) -> None:
        if not self._running:
            return
        for client in self.scheduler.update_from_output(*self._running.popleft()).values():
            if client.scheduler_stats is not None and client.scheduler_stats.kv_connector_stats:
                self.reported.append(client.scheduler_stats.kv_connector_stats)
            for output in client.outputs:
                sent = self.sent[output.request_id]
                sent.tokens += output.new_token_ids
                sent.prefill = output.prefill_stats or sent.prefill
                if output.kv_transfer_params is not None:
                    sent.report = output.kv_transfer_params
                sent.finished |= output.finish_reason is not None

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.sent.pop(name)

    def preempt(self, count: int) -> None:
        """Preempt the last `count` running requests between two steps, as a reset of the cache does."""
        for _ in range(min(count, len(self.scheduler.running))):
            request = self.scheduler.running.pop()
            self.scheduler._preempt_request(request, 0.0, drop_stale_output=True)

    def reset(self, running: bool) -> None:
        """Reset the prefix cache, and running requests too if asked."""
        self.scheduler.reset_prefix_cache(reset_running_requests=running)

    def finish(self, limit: int = 2000) -> None:
        """Step until nothing is left. One more request is done within each `limit` steps."""
        num_left, steps = len(self.sent), 0
        while steps < limit:
            if not self.scheduler.has_requests() and not self._running:
                return
            self.step()
            still = sum(not sent.finished for sent in self.sent.values())
            num_left, steps = still, steps + 1 if still == num_left else 0
        scheduler = self.scheduler
        waiting = [
            f"{r.request_id} {r.status.name} {r.num_computed_tokens}/{r.num_tokens}"
            for r in scheduler.requests.values()
        ]
        raise AssertionError(f"requests hang: {waiting}; held {list(scheduler.spans.held)}; {scheduler.audit()}")

    def check(self) -> None:
        """Every finished request has the right tokens, and every other one a right beginning; books balance."""
        for name, sent in self.sent.items():
            wanted = self._wanted(name)
            assert sent.tokens == wanted[: len(sent.tokens)], f"{name}: {sent.tokens} instead of {wanted}"
            assert not sent.finished or len(sent.tokens) == sent.max_tokens or sent.tokens[-1] in sent.stop
        assert self.scheduler.audit()["problems"] == []

    def answers(self, name: str) -> dict[str, Any]:
        """What the core answered a request besides its spans."""
        reports = unpack(self.sent[name].report)
        assert reports is not None
        return reports[2]

    def statuses(self, name: str) -> list[str]:
        """What became of each span of a request."""
        reports = unpack(self.sent[name].report)
        return [span.status for span in reports[0]] if reports else []

    def whys(self, name: str) -> list[str]:
        """The reason that each span's report gives, or ''."""
        reports = unpack(self.sent[name].report)
        return [span.why for span in reports[0]] if reports else []

    def _wanted(self, name: str) -> list[int]:
        """The right answer: in full attention where the report says so, for all of it or behind its first tokens."""
        sent = self.sent[name]
        if "unsupported" not in self.statuses(name):
            return expected(sent.prompt, sent.max_tokens, sent.seed)
        given_up = re.search(r"the first (\d+) tokens of its answer were sampled with its spans", self.whys(name)[0])
        begun = expected(sent.prompt, int(given_up[1]), sent.seed) if given_up else []
        rest = SpanPrompt((*sent.prompt.token_ids, *begun))
        return [*begun, *expected(rest, sent.max_tokens - len(begun), sent.seed)]
