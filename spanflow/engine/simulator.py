"""An engine without a model: blocks, spans, leases and evictions are real, the text is made up."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from spanflow.engine.blocks import PoolFull
from spanflow.engine.context import checked_max_tokens
from spanflow.engine.detokenize import TextStream
from spanflow.engine.made_up import MadeUp, Script
from spanflow.engine.models import DEFAULT_MODEL, resolve_model
from spanflow.engine.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Prediction,
    SpanReport,
    Usage,
)
from spanflow.engine.residency import Admission, Residency
from spanflow.errors import EngineDied, EngineUnavailable, QueryError
from spanflow.installing import install_advice


class SimulatorEngine:
    """An `Engine` whose cache counts as that of the vLLM engine does, and whose answers follow from the prompt alone.

    It is simpler in two things: no source is taken over in place (where prompt and sources do not fit together, the
    prompt runs exactly), and a lease holds its blocks until no running request can give others back.

    `script` may give the answers, `fault` an error to raise for a request. `residency` is the cache.
    """

    def __init__(
        self,
        info: EngineInfo,
        residency: Residency,
        load_tokenizer: Callable[[], Any],
        *,
        seconds_per_token: float = 0.0,
        seconds_per_prefill_token: float = 0.0,
        script: Script | None = None,
        fault: Callable[[EngineRequest], Exception | None] | None = None,
    ) -> None:
        self.info = info
        self.residency = residency
        self._load_tokenizer = load_tokenizer
        self._seconds = seconds_per_token, seconds_per_prefill_token
        self._script = script
        self._fault = fault
        self._waiting: list[tuple[int, int, str]] = []
        self._arrivals = itertools.count()
        self._changed = asyncio.Event()
        self._closed = False

    @classmethod
    async def start(
        cls,
        model: str = DEFAULT_MODEL,
        *,
        block_size: int = 32,
        num_blocks: int = 1024,
        max_model_len: int = 8192,
        tokenizer: Any = None,
        seconds_per_token: float = 0.0,
        seconds_per_prefill_token: float = 0.0,
        script: Script | None = None,
        fault: Callable[[EngineRequest], Exception | None] | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> SimulatorEngine:
        """A simulator of `num_blocks` blocks of `block_size` tokens; the window is at most what they hold.

        The tokenizer of `model` is loaded when it is first needed. Raises QueryError for sizes that make no pool.
        """
        if min(block_size, num_blocks, max_model_len) < 1:
            raise QueryError(
                f"block_size {block_size}, num_blocks {num_blocks}, max_model_len {max_model_len}: each is at least 1"
            )
        window = min(max_model_len, num_blocks * block_size)
        info = EngineInfo("simulator", model, window, block_size)
        residency = Residency(num_blocks, block_size, window, time.monotonic)
        load = partial(_load_tokenizer, model, progress) if tokenizer is None else lambda: tokenizer
        return cls(
            info,
            residency,
            load,
            seconds_per_token=seconds_per_token,
            seconds_per_prefill_token=seconds_per_prefill_token,
            script=script,
            fault=fault,
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model. Raises ModelError and EngineUnavailable when it is first read."""
        return self._load_tokenizer()

    @cached_property
    def _made_up(self) -> MadeUp:
        return MadeUp(self.tokenizer, self._script)

    async def predict(self, request: EngineRequest) -> Prediction:
        """What the request would find if it ran now and alone; changes nothing. Raises QueryError."""
        room = checked_max_tokens(request, self.info.max_model_len)
        copy = self.residency.copy()
        for running in list(copy.running.values()):
            copy.abandon(running)
        try:
            admission = copy.admit_alone(request, room)
        except PoolFull as full:
            raise _no_room(request, full) from full
        return Prediction(admission.spans, admission.computed, admission.cached, admission.internal)

    def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request; it waits while the pool is full, in order of priority, then of arrival."""
        return self._stream(request, is_source=False)

    async def prefetch(self, request: EngineRequest) -> bool:
        """Run the prompt for one token; its blocks stay to be found, the last one too."""
        if len(request.prompt) >= self.info.max_model_len:
            return False
        request = replace(request, sampling=replace(request.sampling, max_tokens=1))
        spans: tuple[SpanReport, ...] = ()
        async for piece in self._stream(request, is_source=True):
            spans = piece.spans
        return all(span.status != "unsupported" for span in spans)

    async def _stream(self, request: EngineRequest, *, is_source: bool) -> AsyncIterator[EngineOutput]:
        room = self._check(request)
        made_up = await asyncio.to_thread(getattr, self, "_made_up")  # may load the tokenizer
        answer, ends = made_up.answer(request, room)
        admission = await self._admit(request, room)
        sampled: list[int] = []
        try:
            await self._pass_time((admission.computed + admission.internal) * self._seconds[1])
            text = TextStream(partial(self.tokenizer.decode, skip_special_tokens=True), request.sampling.stop)
            for number, token_id in enumerate(answer, 1):
                await self._pass_time(self._seconds[0])
                sampled.append(token_id)
                at_end = number == len(answer)
                new = text.finish() if at_end and ends else text.push(token_id)
                new += text.finish() if at_end else ""
                reason: FinishReason | None = "stop" if text.stopped or (at_end and ends) else None
                if at_end and reason is None:
                    reason = "length"
                if reason is None:
                    yield EngineOutput(new, (token_id,))
                    continue
                self._end(admission, tuple(sampled), is_source=is_source)
                usage = Usage(len(request.prompt), len(sampled), admission.cached, admission.internal)
                yield EngineOutput(new, (token_id,), (), reason, usage, admission.spans)
                return
        finally:
            self._end(admission, None)

    async def release(self, request_ids: tuple[str, ...]) -> None:
        """Give up the leases of these finished requests; unknown ids are ignored."""
        for request_id in request_ids:
            self.residency.leases.end(request_id)
        self._notify()

    async def audit(self) -> Mapping[str, Any]:
        """Counts for tests: running and waiting requests, leases, blocks in use, and `problems`."""
        self.residency.leases.expire()
        pool = self.residency.pool
        return {
            "running": len(self.residency.running),
            "waiting": len(self._waiting),
            "pins": 0,
            "leases": len(self.residency.leases),
            "blocks_in_use": pool.num_blocks - pool.num_free,
            "problems": self.residency.problems(),
        }

    async def reset(self) -> None:
        """Forget all cached KV, leases too."""
        self.residency.reset()
        self._notify()

    async def close(self) -> None:
        """Stop; idempotent. What still runs or waits raises EngineDied."""
        self._closed = True
        self._notify()

    def _check(self, request: EngineRequest) -> int:
        self._refuse_if_closed()
        where = f"request {request.request_id!r}"
        if self._fault is not None and (error := self._fault(request)) is not None:
            raise error
        if request.logprobs is not None:
            raise QueryError(f"{where}: the simulator has no probabilities; use engine 'oracle' or 'vllm'")
        if request.sampling.schema is not None and self._script is None:
            raise QueryError(f"{where}: the simulator follows no schema; script its answers or use engine 'vllm'")
        if request.request_id in self.residency.running or any(request.request_id == r for *_, r in self._waiting):
            raise QueryError(f"{where} is still running; ids of running requests are unique")
        return checked_max_tokens(request, self.info.max_model_len)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineDied("the simulator is closed; start another one")

    async def _admit(self, request: EngineRequest, room: int) -> Admission:
        ticket = (request.priority, next(self._arrivals), request.request_id)
        heapq.heappush(self._waiting, ticket)
        try:
            while True:
                self._refuse_if_closed()
                changed = self._changed
                if self._waiting[0] == ticket and (admission := self._try(request, room)) is not None:
                    return admission
                await changed.wait()
        finally:
            self._waiting.remove(ticket)
            heapq.heapify(self._waiting)
            self.residency.withdraw(request.request_id)
            self._notify()

    def _try(self, request: EngineRequest, room: int) -> Admission | None:
        """Admit, or None where blocks may still come back from running requests."""
        try:
            if self.residency.running:
                return self.residency.admit(request, room)
            return self.residency.admit_alone(request, room)
        except PoolFull as full:
            if self.residency.running:
                return None
            raise _no_room(request, full) from full

    def _end(self, admission: Admission, sampled: tuple[int, ...] | None, *, is_source: bool = False) -> None:
        """Give the blocks back, once; `sampled` is None where the stream was left or broke."""
        if self.residency.running.get(admission.request.request_id) is not admission:
            return
        if sampled is None:
            self.residency.abandon(admission)
        else:
            self.residency.finish(admission, sampled, is_source=is_source)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._refuse_if_closed()


def _no_room(request: EngineRequest, full: PoolFull) -> QueryError:
    return QueryError(
        f"request {request.request_id!r} does not fit into the pool: {full}; lower max_tokens or raise num_blocks"
    )


def _load_tokenizer(model: str | Path, progress: Callable[[str], None] | None) -> Any:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EngineUnavailable(
            f"the tokenizer of {model} needs {error.name}; {install_advice()}, "
            "or start the simulator with a tokenizer of your own"
        ) from error
    return AutoTokenizer.from_pretrained(str(resolve_model(model, progress=progress)))
