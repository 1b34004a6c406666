"""The engine that is slow, simple and right: prompts with spans on transformers, one pass at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from torch import Tensor

from spanflow.engine.context import checked_max_tokens, computed_whole, count_span, source_key, without_spans
from spanflow.engine.detokenize import TextStream
from spanflow.engine.leases import LeaseBook, tenant
from spanflow.engine.models import resolve_model
from spanflow.engine.oracle_model import OracleModel, Sequence
from spanflow.engine.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Prediction,
    SpanReport,
    Usage,
)
from spanflow.errors import EngineDied, ModelError, QueryError
from spanflow.ir.nodes import Sampling

T = TypeVar("T")


@dataclass(slots=True)
class _Answer:
    """What has been sampled for one request."""

    text: TextStream
    max_tokens: int
    stop_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)

    def take(self, token_id: int) -> tuple[str, FinishReason | None]:
        """One more token: the text that is now certain, and why the answer ends here, if it does."""
        self.token_ids.append(token_id)
        if token_id in self.stop_ids:
            return self.text.finish(), "stop"
        new = self.text.push(token_id)
        at_limit = len(self.token_ids) == self.max_tokens
        if at_limit:
            new += self.text.finish()
        if self.text.stopped:
            return new, "stop"
        return new, "length" if at_limit else None


class OracleEngine:
    """An `Engine` over `OracleModel`. Spans are never evicted; a schema is refused (nothing guides decoding here)."""

    def __init__(self, model: OracleModel, tokenizer: Any, info: EngineInfo) -> None:
        self.info = info
        self.model = model
        self._tokenizer = tokenizer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spanflow-oracle")
        self._seen: set[Any] = set()
        self._leases: LeaseBook[None] = LeaseBook(drop=lambda _: None, clock=time.monotonic)
        self._running: set[str] = set()
        self._closed = False
        self._stop_ids = _stop_ids(model.model, tokenizer)

    @classmethod
    async def start(
        cls,
        model: str,
        *,
        max_model_len: int | None = None,
        device: str = "cpu",
        progress: Callable[[str], None] | None = None,
    ) -> OracleEngine:
        """Load a model by name, path or hub name. Raises ModelError, EngineUnavailable where memory is too short, and
        QueryError for a window that it does not have."""
        return await asyncio.to_thread(cls._load, model, max_model_len, device, progress)

    @classmethod
    def _load(
        cls, model: str, max_model_len: int | None, device: str, progress: Callable[[str], None] | None
    ) -> OracleEngine:
        from safetensors import SafetensorError
        from transformers import AutoTokenizer

        place = resolve_model(model, progress=progress)
        try:
            try:
                loaded = OracleModel.load(place, device)
            except (OSError, ValueError, SafetensorError):
                place = resolve_model(
                    model, progress=progress, verify=True
                )  # an embedded one is built again if damaged
                loaded = OracleModel.load(place, device)
            tokenizer = AutoTokenizer.from_pretrained(str(place))
        except (OSError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"model {model!r} does not load from {place}: {error}. Name a directory or a hub name "
                "of a causal language model, or 'smollm2'."
            ) from error
        window: int = loaded.model.config.max_position_embeddings
        if max_model_len is not None and not 1 <= max_model_len <= window:
            raise QueryError(f"max_model_len {max_model_len}: model {model!r} has a window of {window} tokens")
        info = EngineInfo(
            name="oracle",
            model=model,
            max_model_len=max_model_len or window,
            block_size=1,
            spans_unsupported=loaded.spans_unsupported,
            versions={name: version(name) for name in ("torch", "transformers")},
            dtype="float32",
        )
        return cls(loaded, tokenizer, info)

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model."""
        return self._tokenizer

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request; passes of several streams take turns."""
        max_tokens = self._check(request)
        left = threading.Event()
        self._running.add(request.request_id)
        try:
            spans, done = self._report(request)
            prompt = without_spans(request.prompt) if self.info.spans_unsupported else request.prompt
            check = partial(self._check_wanted, left)
            sequence = await self._in_thread(partial(self.model.prefill, prompt, room=max_tokens, check=check))
            done()
            sample = _sampler(request.sampling)
            answer = self._answer(request, max_tokens)
            reason: FinishReason | None = None
            while reason is None:
                token_id, logprobs = await self._in_thread(
                    partial(_next, sequence, answer.token_ids[-1:], sample, request.logprobs)
                )
                text, reason = answer.take(token_id)
                rest: dict[str, Any] = {}
                if reason is not None:
                    if request.lease is not None:
                        self._leases.add(request, request.lease, tuple(answer.token_ids), None)
                    cached = sum(span.moved for span in spans)
                    rest = {"usage": Usage(len(request.prompt), len(answer.token_ids), cached), "spans": spans}
                yield EngineOutput(text, (token_id,), logprobs, reason, **rest)
        finally:
            left.set()
            self._running.discard(request.request_id)

    async def predict(self, request: EngineRequest) -> Prediction:
        """Which spans it has seen; it makes each when it is wanted, beside no clock."""
        self._check(request)
        reports, _ = self._report(request)
        num_moved = sum(report.moved for report in reports)
        return Prediction(reports, len(request.prompt) - num_moved, num_moved, 0)

    async def prefetch(self, request: EngineRequest) -> bool:
        """Nothing: what is timed here is not the cache."""
        return False

    async def release(self, request_ids: tuple[str, ...]) -> None:
        """Give up the leases of these finished requests; unknown ids are ignored."""
        for request_id in request_ids:
            self._leases.end(request_id)

    async def audit(self) -> Mapping[str, Any]:
        """Counts for tests: running requests, leases, known spans, and `problems`, always empty here."""
        self._leases.expire()
        return {
            "running": len(self._running),
            "pins": 0,
            "leases": len(self._leases),
            "blocks_in_use": 0,
            "spans": len(self._seen),
            "problems": [],
        }

    async def reset(self) -> None:
        """Forget all cached KV, leases too."""
        self._seen.clear()
        self._leases.clear()
        await self._in_thread(self.model.forget)

    async def close(self) -> None:
        """Stop; idempotent."""
        self._closed = True
        self._leases.clear()
        await asyncio.to_thread(self._thread.shutdown)

    def _check_wanted(self, left: threading.Event) -> None:
        """Between passes: is anybody still waiting for the result?"""
        if self._closed or left.is_set():
            raise EngineDied("the oracle engine was closed, or the request given up, before the prompt had run")

    async def _in_thread(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise EngineDied("the oracle engine is closed; start another one")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _check(self, request: EngineRequest) -> int:
        if self._closed:
            raise EngineDied("the oracle engine is closed; start another one")
        if request.sampling.schema is not None:
            raise QueryError(
                f"request {request.request_id!r}: the oracle engine does not guide decoding by a schema; "
                "drop the schema or use engine 'vllm'"
            )
        if request.adapter is not None:
            raise QueryError(f"request {request.request_id!r}: the oracle engine loads no adapters; use engine 'vllm'")
        if request.request_id in self._running:
            raise QueryError(f"request {request.request_id!r} is still running; ids of running requests are unique")
        return checked_max_tokens(request, self.info.max_model_len)

    def _answer(self, request: EngineRequest, max_tokens: int) -> _Answer:
        decode = partial(self._tokenizer.decode, skip_special_tokens=True)
        return _Answer(TextStream(decode, request.sampling.stop), max_tokens, self._stop_ids)

    def _report(self, request: EngineRequest) -> tuple[tuple[SpanReport, ...], Callable[[], None]]:
        """What becomes of each span, and what to do once the prompt has run: the spans are known, leases consumed."""
        if self.info.spans_unsupported:
            why = self.info.spans_unsupported
            spans = request.prompt.spans
            return tuple(
                SpanReport(s.start, s.end, "unsupported", computed=len(s), why=why) for s in spans
            ), lambda: None
        reports, keys, taken = [], set(), {}
        owner = tenant(request)
        for span in request.prompt.spans:
            key = (owner, source_key(request.prompt, span))
            held = self._leases.find(owner, request.prompt, span)
            if held is not None:
                taken[held.request_id] = held
            if (whole := computed_whole(span)) is not None:
                reports.append(whole)
                continue
            hit = key in self._seen or held is not None
            keys.add(key)
            moved, repaired, computed = count_span(request.prompt, span)
            reports.append(SpanReport(span.start, span.end, "hit" if hit else "new", moved, repaired, computed))

        def done() -> None:
            self._seen.update(keys)
            for held in taken.values():
                self._leases.consume(held, request.request_id)

        return tuple(reports), done


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for ids in (getattr(model.generation_config, "eos_token_id", None), tokenizer.eos_token_id):
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    return frozenset(found)


def _next(
    sequence: Sequence, newest: list[int], sample: Callable[[Tensor], int], num_logprobs: int | None
) -> tuple[int, tuple[dict[int, float], ...]]:
    """Feed the newest token, if any, and sample the next one."""
    logits = sequence.step(newest[0]) if newest else sequence.logits
    token_id = sample(logits[-1])
    if num_logprobs is None:
        return token_id, ()
    logprobs = torch.log_softmax(logits[-1], -1)
    best = torch.topk(logprobs, min(num_logprobs, len(logprobs))).indices.tolist()
    return token_id, ({i: float(logprobs[i]) for i in dict.fromkeys([token_id, *best])},)


def _sampler(sampling: Sampling) -> Callable[[Tensor], int]:
    """Greedy at temperature 0; else from the smallest set of tokens that holds `top_p` of the probability."""
    if sampling.temperature == 0:
        return lambda logits: int(logits.argmax())
    generator = torch.Generator()
    if sampling.seed is None:
        generator.seed()
    else:
        generator.manual_seed(sampling.seed)

    def sample(logits: Tensor) -> int:
        probs, order = torch.softmax(logits.cpu() / sampling.temperature, -1).sort(descending=True)
        probs[probs.cumsum(-1) - probs >= sampling.top_p] = 0
        return int(order[torch.multinomial(probs, 1, generator=generator)])

    return sample
