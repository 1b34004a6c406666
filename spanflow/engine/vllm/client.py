"""The vLLM engine as the rest of spanflow sees it: start it, stream a request, audit, reset, close."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from spanflow.engine.context import checked_max_tokens
from spanflow.engine.environment import prepare_environment, quiet_start
from spanflow.engine.payload import KEY, Ask, Report, encode, unpack
from spanflow.engine.protocol import EngineInfo, EngineOutput, EngineRequest, Prediction, Usage
from spanflow.engine.recent import Recent
from spanflow.errors import EngineDied, EngineUnavailable, QueryError, SpansUnsupported
from spanflow.installing import install_advice, is_vllm_known, measured_versions, vllm_and_range, vllm_version
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import SpanPrompt

if TYPE_CHECKING:
    from spanflow.engine.vllm.backend import AsyncBackend, StepBackend
    from spanflow.engine.vllm.contract import CompletionOutput, RequestOutput

_log = logging.getLogger("spanflow")
_GIB = 1 << 30
_REMEMBERED_LEASES = 1 << 14


class VllmEngine:
    """An embedded vLLM with the span scheduler; `start` makes one. See `engine.protocol.Engine`."""

    def __init__(self, backend: AsyncBackend | StepBackend, info: EngineInfo, adapters: Mapping[str, str]) -> None:
        self._backend = backend
        self.info = info
        self._adapters = {name: (number, path) for number, (name, path) in enumerate(adapters.items(), 1)}
        self._leased: Recent[str, tuple[SpanPrompt, str | None, str | None]] = Recent(_REMEMBERED_LEASES)
        self._names = itertools.count()
        self._closed = False

    @classmethod
    async def start(
        cls,
        model: str,
        *,
        spans: bool = True,
        require_spans: bool = False,
        in_process: bool = False,
        block_size: int = 32,
        kv_cache_gib: float | None = None,
        cpu_kv_cache_gib: float = 1.0,
        max_model_len: int | None = None,
        adapters: Mapping[str, str] | None = None,
        progress: Callable[[str], None] | None = None,
        audit_steps: bool = False,
        **options: Any,
    ) -> VllmEngine:
        """Start vLLM on a model's directory or hub name.

        `spans` False gives stock vLLM, for comparison. `in_process` runs the engine's core in this
        process (tests, debugging). The KV cache takes `kv_cache_gib`; where that is None, `cpu_kv_cache_gib` on a CPU,
        and on a GPU what vLLM's own `gpu_memory_utilization` leaves. The window is `max_model_len`; where that is None,
        what the KV cache holds of the model's own. `adapters` maps names of LoRA adapters to
        directories. The event loop is not blocked meanwhile; cancelled, this ends once nothing is left of the engine.
        `audit_steps` recounts all references after each step and fails on a difference. Further
        `options` are vLLM's engine arguments. Raises EngineUnavailable, EngineDied, ModelError, SpansUnsupported, and
        QueryError for options that vLLM does not have, or that spans need for themselves.
        """
        say = progress or (lambda _: None)
        prepare_environment()
        say("loading vLLM")
        try:
            await asyncio.to_thread(_import)
            from spanflow.engine.vllm import arguments as of_vllm
            from spanflow.engine.vllm import backend, contract
        except ImportError as error:
            other = "" if is_vllm_known() or vllm_version() == "unknown" else f". {vllm_and_range()}"
            raise EngineUnavailable(f"vLLM can't be imported ({error}){other}; {install_advice()}") from error
        if max_model_len is not None and max_model_len < 1:
            raise QueryError(f"max_model_len is {max_model_len}; give at least 1, or leave it out for what fits")
        if spans:
            contract.check()
        of_vllm.check_options(options)
        arguments: dict[str, Any] = {
            "model": str(model),
            "block_size": block_size,
            "max_model_len": -1 if max_model_len is None else max_model_len,  # -1: as much as the KV cache holds
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
        }
        if of_vllm.is_cpu():
            arguments |= {"dtype": "float32", "distributed_executor_backend": "uni"}
            kv_cache_gib = cpu_kv_cache_gib if kv_cache_gib is None else kv_cache_gib
        if kv_cache_gib is not None:
            arguments["kv_cache_memory_bytes"] = int(kv_cache_gib * _GIB)
        if adapters:
            arguments |= {"enable_lora": True, "max_loras": len(adapters), "max_lora_rank": 64}
        arguments |= options
        if adapters and of_vllm.is_cpu():
            # There the tokens of no adapter are computed with what stands in the last place: none may ever stand there.
            arguments["max_loras"] = max(arguments["max_loras"], len(adapters) + 1)
        if spans:
            from spanflow.lowering.template import headers_of

            tokenizer = await asyncio.to_thread(of_vllm.load_vllm_tokenizer, arguments)
            arguments |= of_vllm.span_arguments(headers_of(tokenizer), audit_steps, own_process=not in_process)
        say(f"starting vLLM {vllm_version()} on {model}")
        started = await backend.start(arguments, in_process=in_process)
        if started.max_model_len < started.own_window and max_model_len is None:
            _log.warning(
                "the window is %d tokens, which is what the KV cache holds, and not the %d that %s has: a larger "
                "kv_cache_gib makes room for more",
                *(started.max_model_len, started.own_window, model),
            )
        why, found = "" if spans else "the engine was started without spans", measured_versions()
        info = EngineInfo("vllm", str(model), started.max_model_len, block_size, why, found, started.dtype)
        engine = cls(started, info, adapters or {})
        if spans:
            try:
                await engine._probe(require_spans)
            except BaseException:
                await engine.close()
                raise
        say("ready")
        return engine

    @property
    def tokenizer(self) -> Any:
        """The model's Hugging Face tokenizer."""
        return self._backend.tokenizer

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request; see the protocol."""
        checked_max_tokens(request, self.info.max_model_len)
        ask = Ask(request.prompt.spans, request.lease)
        wants_payload = not self._is_stock and (ask.spans or ask.lease)
        if request.lease is not None and not self._is_stock:
            self._leased.keep(request.request_id, (request.prompt, request.salt, request.adapter))
        num_completion = 0
        report = None
        async with aclosing(self._run(request, ask if wants_payload else None)) as pieces:
            async for piece in pieces:
                report = unpack(piece.kv_transfer_params) or report
                completion = piece.outputs[0]
                reason, new = completion.finish_reason, tuple(completion.token_ids)
                num_completion += len(new)
                if report is not None and "error" in report[2]:
                    raise QueryError(report[2]["error"])
                if reason is None:
                    yield EngineOutput(completion.text, new, _logprobs(completion))
                    continue
                spans, internal, _ = report or ((), 0, {})
                usage = Usage(len(request.prompt), num_completion, piece.num_cached_tokens or 0, internal)
                error = "the engine failed on this request" if reason == "error" else ""
                yield EngineOutput(completion.text, new, _logprobs(completion), reason, usage, spans, error)

    async def predict(self, request: EngineRequest) -> Prediction | None:
        """Ask the core what the request would find; stock vLLM does not tell."""
        checked_max_tokens(request, self.info.max_model_len)
        if self._is_stock:
            return None
        bare = replace(request, sampling=Sampling(request.sampling.max_tokens), logprobs=None)  # no grammar to compile
        spans, internal, answers = await self._answered(bare, Ask(request.prompt.spans, look=True))
        computed = int(answers["look"])
        return Prediction(spans, computed, len(request.prompt) - computed, internal)

    async def prefetch(self, request: EngineRequest) -> bool:
        """Compute and keep the KV of a prompt, the block that it does not fill too."""
        if self.info.spans_unsupported or len(request.prompt) >= self.info.max_model_len:
            return False
        request = replace(request, sampling=replace(request.sampling, max_tokens=1))
        spans, *_ = await self._answered(request, Ask(request.prompt.spans, keep=True))
        return all(span.status != "unsupported" for span in spans)

    async def release(self, request_ids: tuple[str, ...]) -> None:
        """Give up the leases of these finished requests."""
        prompts = [found for name in request_ids if (found := self._leased.pop(name, None)) is not None]
        for tenant in {(salt, adapter) for _, salt, adapter in prompts}:
            digests = tuple(dict.fromkeys(p.digest for p, *rest in prompts if tuple(rest) == tenant))
            await self._ask(Ask(releases=digests), salt=tenant[0], adapter=tenant[1])

    async def audit(self) -> Mapping[str, Any]:
        """Counts and `problems` of the engine's core, also from its own process."""
        if self._is_stock:
            return {"problems": []}
        return dict((await self._ask(Ask(audit=True)))["audit"])

    async def reset(self) -> None:
        """Forget all cached KV; requests in flight start again."""
        self._refuse_if_closed()
        if not await self._backend.reset():
            raise EngineUnavailable("the cache could not be reset while requests hold it; wait for them, or abort them")

    async def close(self) -> None:
        """Stop the engine and its process."""
        if not self._closed:
            self._closed = True
            await self._backend.close()

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise EngineDied("the engine is closed; open a new session")

    @property
    def _is_stock(self) -> bool:
        return bool(self.info.spans_unsupported) and not self._backend.has_spans

    async def _run(self, request: EngineRequest, ask: Ask | None) -> AsyncGenerator[RequestOutput, None]:
        self._refuse_if_closed()
        running, name = self._backend.running, request.request_id
        if name in running:
            raise QueryError(f"request {name!r} is still running; ids of running requests are unique")
        lora = None
        if request.adapter is not None:
            if request.adapter not in self._adapters:
                known = ", ".join(self._adapters) or "none"
                raise QueryError(f"unknown adapter {request.adapter!r}; this engine was started with: {known}")
            lora = (request.adapter, *self._adapters[request.adapter])
        extra, is_probe = (None, False) if ask is None else ({KEY: encode(ask)}, ask.probe)
        running.add(name)
        try:
            async with aclosing(self._backend.generate(request, extra, lora, ignore_eos=is_probe)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            running.discard(name)

    async def _ask(
        self, ask: Ask, prompt: SpanPrompt | None = None, max_tokens: int = 1, **tenant: str | None
    ) -> dict[str, Any]:
        """A request whose answer is its report."""
        name = f"spanflow-ask-{next(self._names)}"
        request = EngineRequest(name, prompt or SpanPrompt((1,)), Sampling(max_tokens), **tenant)  # type: ignore[arg-type]
        return (await self._answered(request, ask))[2]

    async def _answered(self, request: EngineRequest, ask: Ask) -> Report:
        """The report of a request, at its end."""
        report = None
        async with aclosing(self._run(request, ask)) as pieces:
            async for piece in pieces:
                report = unpack(piece.kv_transfer_params) or report
        if report is None:
            raise EngineDied(f"the engine's core does not answer {request.request_id}")
        if "error" in report[2]:
            raise QueryError(report[2]["error"])
        return report

    async def _probe(self, require_spans: bool) -> None:
        """Ask the core whether spans are served, once a key rotated on its own cache has been compared."""
        from spanflow.engine.vllm.probe import probe_tokens

        started, num_steps = self._backend, 4
        most, reason = started.max_model_len - num_steps, "its window has no room for a test of rotated keys"
        if most >= 2:
            tokens = probe_tokens(started.kv_itemsize, most, started.vocabulary)
            reason = (await self._ask(Ask(probe=True), SpanPrompt(tokens), num_steps))["unsupported"]
        if not reason:
            return
        if require_spans:
            raise SpansUnsupported(
                f"spans can't be served exactly for {self.info.model}: {reason}. Use another model or option, "
                "or open the session without require_spans to run with full attention."
            )
        _log.warning("spans run with full attention on %s: %s", self.info.model, reason)
        self.info = replace(self.info, spans_unsupported=reason)


def _import() -> None:
    """Import what imports vLLM, which takes seconds."""
    with quiet_start():
        import_module("spanflow.engine.vllm.backend")


def _logprobs(completion: CompletionOutput) -> tuple[Mapping[int, float], ...]:
    return tuple({token: value.logprob for token, value in step.items()} for step in completion.logprobs or ())
