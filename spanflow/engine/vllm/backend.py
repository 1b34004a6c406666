"""Two ways to run vLLM's engine: `AsyncLLM` in its own process, or `LLMEngine` stepped by a thread of this one."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

from safetensors import SafetensorError

from spanflow.engine.aside import end_aside, make_aside
from spanflow.engine.environment import cores_left_free, environment_variable, quiet_start
from spanflow.engine.protocol import EngineRequest
from spanflow.engine.vllm.arguments import REFUSALS, too_little_kv, with_window
from spanflow.engine.vllm.contract import (
    AsyncEngineArgs,
    AsyncLLM,
    EngineDeadError,
    Executor,
    InprocClient,
    LLMEngine,
    LoRARequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
    TokensPrompt,
    check_client,
    ensure_kv_transfer_shutdown,
)
from spanflow.errors import EngineDied, EngineUnavailable, ModelError, QueryError, SpanflowError

E = TypeVar("E", AsyncLLM, LLMEngine)
B = TypeVar("B")
Extra: TypeAlias = dict[str, Any] | None
Lora: TypeAlias = tuple[str, int, str] | None
Outputs: TypeAlias = AsyncGenerator[RequestOutput, None]

_in_process_start = threading.Lock()
_in_process_engines = WeakSet[LLMEngine]()


async def start(arguments: dict[str, Any], *, in_process: bool) -> AsyncBackend | StepBackend:
    """Start the engine. Raises ModelError or EngineUnavailable with vLLM's own last words."""
    has_spans = "scheduler_cls" in arguments
    try:
        if in_process:
            engine = await make_aside(lambda: _in_process(arguments), _end_in_process)
            return await _attached(StepBackend, engine, _end_in_process, has_spans)
        # Made where no loop runs, it attaches itself to the one that it is first used on.
        client = await make_aside(lambda: _in_its_process(arguments), _end_its_process)
        return await _attached(AsyncBackend, client, _end_its_process, has_spans)
    except SpanflowError:
        raise
    except (OSError, RuntimeError, SafetensorError, *REFUSALS) as error:
        raise await asyncio.to_thread(_explained, error, arguments) from error


def _explained(error: Exception, arguments: Mapping[str, Any]) -> SpanflowError:
    """What kept an engine from starting, as a caller can use it."""
    model, is_of_files = arguments["model"], isinstance(error, OSError | SafetensorError)
    if not is_of_files and (why := too_little_kv(arguments)):
        return EngineUnavailable(f"vLLM did not start on {model}: {why}. It says: {error}")
    if isinstance(error, RuntimeError):
        return EngineUnavailable(f"vLLM did not start on {model}: {error}. Set VLLM_LOGGING_LEVEL=INFO to see its log.")
    return ModelError(f"vLLM can't load {model}: {error}")


async def _attached(kind: Callable[[E, bool], B], engine: E, end: Callable[[E], None], has_spans: bool) -> B:
    """The backend of an engine that was made; the engine is ended where there can be none."""
    try:
        return kind(engine, has_spans)
    except BaseException:
        await end_aside(lambda: end(engine))
        raise


def _in_its_process(given: Mapping[str, Any]) -> AsyncLLM:
    workers = given.get("tensor_parallel_size", 1) * given.get("pipeline_parallel_size", 1)
    with quiet_start(cores_left_free(workers) if "scheduler_cls" in given else None):
        return AsyncLLM.from_engine_args(with_window(given))


def _end_its_process(engine: AsyncLLM) -> None:
    engine.shutdown()


def _end_in_process(engine: LLMEngine) -> None:
    with _in_process_start:
        try:
            engine.engine_core.shutdown()
        finally:
            _in_process_engines.discard(engine)


def _in_process(given: Mapping[str, Any]) -> LLMEngine:
    """Such starts are not concurrent: each waits for the one before it.

    They change what belongs to the whole process, the filters of warnings and a variable of the environment, and put it
    back. Other threads run with it meanwhile: no engine with a process of its own should be started beside them.
    """
    # vLLM's worker, which elsewhere has a process of its own, walks through deprecated names.
    with _in_process_start, quiet_start(), warnings.catch_warnings(action="ignore"):
        if _in_process_engines:  # it would move KV in the cache of the one that came last
            raise EngineUnavailable(
                "an engine runs in this process already, and vLLM has one KV connector for each process: close that "
                "one first, or leave in_process out"
            )
        ensure_kv_transfer_shutdown()  # of one that did not start, or was never closed
        engine = _stepped_engine(with_window(given))
        _in_process_engines.add(engine)
        return engine


def _stepped_engine(arguments: AsyncEngineArgs) -> LLMEngine:
    # vLLM's CPU platform would put the worker into a process of its own
    with environment_variable("VLLM_ENABLE_V1_MULTIPROCESSING", "0"):
        config = arguments.create_engine_config()
        if arguments.async_scheduling:  # the CPU platform switches it off; asked for by name it stays
            config.scheduler_config.async_scheduling = True
        return LLMEngine(config, Executor.get_class(config), log_stats=False, multiprocess_mode=False)


def sampling_params(request: EngineRequest, extra: Extra, ignore_eos: bool) -> SamplingParams:
    """vLLM's parameters for a request; answers come in pieces."""
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop=list(sampling.stop) or None,
        seed=sampling.seed,
        logprobs=request.logprobs,
        structured_outputs=StructuredOutputsParams(json=sampling.schema) if sampling.schema else None,
        extra_args=extra,
        ignore_eos=ignore_eos,
        output_kind=RequestOutputKind.DELTA,
    )


def _lora(lora: Lora) -> LoRARequest | None:
    return LoRARequest(*lora) if lora else None


def _prompt(request: EngineRequest) -> TokensPrompt:
    ids = list(request.prompt.token_ids)
    if request.salt is None:
        return TokensPrompt(prompt_token_ids=ids)
    return TokensPrompt(prompt_token_ids=ids, cache_salt=request.salt)


class _Backend:
    """What is read from an engine of either kind."""

    def __init__(self, engine: AsyncLLM | LLMEngine, has_spans: bool) -> None:
        check_client(engine)
        self.engine = engine
        self.has_spans = has_spans
        self.running: set[str] = set()  # kept by whoever calls `generate`
        self.closing = False
        self.tokenizer: Any = engine.get_tokenizer()
        model = engine.model_config
        self.max_model_len: int = model.max_model_len
        self.own_window: int = model.get_and_verify_max_len(-1)
        self.vocabulary: int = model.get_vocab_size()
        self.dtype = str(model.dtype).removeprefix("torch.")
        cache_dtype = engine.vllm_config.cache_config.cache_dtype
        self.kv_itemsize = 4 if (self.dtype if cache_dtype == "auto" else cache_dtype) == "float32" else 2


class AsyncBackend(_Backend):
    """`AsyncLLM`: the engine's core in a process of its own."""

    engine: AsyncLLM

    async def generate(self, request: EngineRequest, extra: Extra, lora: Lora, *, ignore_eos: bool = False) -> Outputs:
        """vLLM's outputs of one request; leaving early aborts it."""
        died = EngineDied(f"vLLM's engine stopped while {request.request_id} was in flight; open a new session")
        try:
            prompt, params = _prompt(request), sampling_params(request, extra, ignore_eos)
            pieces = self.engine.generate(
                prompt, params, request.request_id, lora_request=_lora(lora), priority=request.priority
            )
            async with aclosing(pieces):
                async for piece in pieces:
                    if self.closing and piece.outputs[0].finish_reason == "abort":
                        raise died
                    yield piece
        except EngineDeadError as error:
            raise died from error
        except REFUSALS as error:
            raise QueryError(f"vLLM refused {request.request_id}: {error}") from error

    async def reset(self) -> bool:
        """Forget cached KV; running requests start again."""
        return bool(await self.engine.reset_prefix_cache(reset_running_requests=True))

    async def close(self) -> None:
        """Stop the process; what runs ends with EngineDied."""
        engine, self.closing = self.engine, True
        del self.engine
        # It would take the end of the process for a crash, and log it as one.
        if engine.output_handler is not None:
            engine.output_handler.cancel()
        try:
            await asyncio.to_thread(engine.shutdown)
        finally:  # who still waits is woken; who comes later finds the engine dead
            await engine.abort(self.running)


class StepBackend(_Backend):
    """`LLMEngine` in this process: one thread adds requests, steps, and hands outputs to the event loop."""

    engine: LLMEngine

    def __init__(self, engine: LLMEngine, has_spans: bool) -> None:
        super().__init__(engine, has_spans)
        self.loop = asyncio.get_running_loop()
        self.lock = threading.Lock()
        self.wake = threading.Condition(self.lock)
        self.queues: dict[str, asyncio.Queue[RequestOutput | BaseException]] = {}
        self.stopping = False
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._step_for_ever, name="spanflow-engine", daemon=True)
        self.thread.start()

    async def generate(self, request: EngineRequest, extra: Extra, lora: Lora, *, ignore_eos: bool = False) -> Outputs:
        """vLLM's outputs of one request; leaving early aborts it."""
        name, queue = request.request_id, asyncio.Queue[RequestOutput | BaseException]()
        finished = abandoned = False

        def add() -> None:
            with self.wake:
                if self.failure is not None:
                    raise EngineDied(f"the engine has stopped ({self.failure}); open a new session")
                if abandoned:  # by a caller who was cancelled while this thread waited for a step to end
                    return
                prompt, params = _prompt(request), sampling_params(request, extra, ignore_eos)
                self.engine.add_request(name, prompt, params, lora_request=_lora(lora), priority=request.priority)
                self.queues[name] = queue
                self.wake.notify()

        try:
            await asyncio.to_thread(add)
            while not finished:
                piece = await queue.get()
                if isinstance(piece, BaseException):
                    finished = True
                    raise EngineDied(f"the engine stopped while {name} was in flight: {piece}") from piece
                finished = piece.finished
                yield piece
        except REFUSALS as error:
            finished = True
            raise QueryError(f"vLLM refused {name}: {error}") from error
        finally:
            abandoned = True
            if finished:
                self.queues.pop(name, None)
            else:
                await asyncio.to_thread(self._abort, name)

    def _abort(self, name: str) -> None:
        with self.wake:
            if self.queues.pop(name, None) is not None and self.failure is None:
                self.engine.abort_request([name])
                self.wake.notify()

    async def reset(self) -> bool:
        """Forget cached KV; running requests start again."""

        def locked() -> bool:
            with self.lock:
                return bool(self.engine.reset_prefix_cache(reset_running_requests=True))

        return await asyncio.to_thread(locked)

    async def close(self) -> None:
        """Stop the thread and the engine; what runs ends with EngineDied."""
        with self.wake:
            self.stopping = True
            self.wake.notify()

        def end() -> None:
            self.thread.join()
            _end_in_process(self.engine)

        await asyncio.to_thread(end)  # cancelled, it goes on

    def _step_for_ever(self) -> None:
        try:
            while True:
                with self.wake:
                    while not self.stopping and not self._has_work():
                        self.wake.wait()
                    if self.stopping:
                        raise EngineDied("it was closed")
                    self._step()
        except BaseException as error:  # noqa: BLE001 - everybody who waits for the engine must know
            with self.lock:
                self.failure = error
                for queue in list(self.queues.values()):
                    self.loop.call_soon_threadsafe(queue.put_nowait, error)

    def _has_work(self) -> bool:
        client = self.engine.engine_core
        assert isinstance(client, InprocClient)
        return bool(self.engine.has_unfinished_requests() or client.engine_core.scheduler.has_requests())

    def _step(self) -> None:
        for piece in self.engine.step():
            assert isinstance(piece, RequestOutput)  # of a model that generates
            queue = self.queues.get(piece.request_id)
            if queue is not None:
                self.loop.call_soon_threadsafe(queue.put_nowait, piece)
