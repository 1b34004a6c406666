"""The composition root: a model on an engine, and all that can be asked of it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from queue import SimpleQueue
from types import MappingProxyType, TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from spanflow.compile import Askable, Compiled, bind_query, compile_query
from spanflow.engine.models import DEFAULT_MODEL
from spanflow.engine.protocol import EngineInfo, Prediction
from spanflow.errors import EngineDied
from spanflow.explain import Explanation, explain, lower_known
from spanflow.ir.copying import copied
from spanflow.ir.fidelity import Rung
from spanflow.ir.nodes import Node
from spanflow.ir.ranges import check_count
from spanflow.optimizer.order import OrderHint
from spanflow.result import Done, Event, Result
from spanflow.runner import ErrorPolicy, Host, RunOptions, run_plan
from spanflow.runner.background import Job
from spanflow.runner.predict import predict
from spanflow.runner.prefetch import prefetch
from spanflow.runner.progress import Telling, speaker
from spanflow.runner.startup import Core, EngineChoice

T = TypeVar("T")
Emit: TypeAlias = Callable[[Event], None]


class Session:
    """A model on an engine: runs queries, streams them, explains them.

    `engine` is 'vllm' (embedded), 'oracle' or 'simulator'; further options are the engine's own. `rung` and `anchor`
    hold for each commute that names none (None: repair(32) for texts, behind the message's header, and moved for
    generated answers), `max_tokens` and `seed` for each generate that names none. `require_spans` refuses an engine
    that cannot serve spans, and fails a run in whose report spans are unsupported; without it both run with full
    attention. At most `max_concurrency` generations are in flight. `on_error`, `timeout` and further options of a run
    are described at `RunOptions`; each method takes them for one run. `progress` goes to stderr, or to a function; None
    means where that is a terminal. `order_hint` chooses the order of operands of exact commutes, which otherwise stand
    in one order whatever the cache holds: `spanflow.optimizer.order.RecentOrders()` goes on where earlier prompts
    began.

    The engine starts when the session is entered or first used, on a thread of the session's own: methods may be
    called from any thread, the asynchronous ones from any event loop. Raises QueryError for options.

    >>> from spanflow import Session
    >>> Session("smollm2", max_tokens=0)
    Traceback (most recent call last):
        ...
    spanflow.errors.QueryError: max_tokens: must be a whole number at least 1, got 0
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        engine: str = "vllm",
        rung: Rung | str | None = None,
        anchor: str | None = None,
        require_spans: bool = False,
        max_tokens: int = 256,
        seed: int = 0,
        max_concurrency: int = 64,
        on_error: ErrorPolicy = "fail",
        timeout: float | None = None,
        progress: bool | Callable[[str], None] | None = None,
        order_hint: OrderHint | None = None,
        **engine_options: Any,
    ) -> None:
        given = {"rung": rung, "anchor": anchor, "max_tokens": max_tokens, "seed": seed, "on_error": on_error}
        self._options = RunOptions().changed(given | {"timeout": timeout})
        check_count(max_concurrency, "max_concurrency", 1)
        self._say = speaker(progress)
        self._order_hint = order_hint
        self._adapters = tuple(engine_options.get("adapters") or ())
        choice = EngineChoice(engine, str(model), require_spans, max_concurrency, copied(engine_options), self._say)
        self._core = Core(choice)
        self._close = weakref.finalize(self, self._core.close)

    # Running.

    def run(self, query: Askable, **overrides: Any) -> Result:
        """Run one query to its end. Options of `RunOptions` may be given for this run alone.

        What is no generate is what the model is asked: text, a list of messages, a commute. Interrupting this aborts
        what is in flight. Raises QueryError, PromptTooLong, EngineDied, GenerationFailed, GenerationTimeout,
        SpansUnsupported.
        """
        options = self._options.changed(overrides)
        return self._begin(lambda: self._run(query, options)).wait()

    async def arun(self, query: Askable, **overrides: Any) -> Result:
        """Like `run`; retrievers that are asynchronous run on the calling loop."""
        options = self._options.changed(overrides)
        bound = await bind_query(query)
        return await self._begin(lambda: self._run_bound(bound, options)).join()

    def stream(self, query: Askable, **overrides: Any) -> Generator[Event, None, None]:
        """The events of one run as they happen, `Done` with the result last; it runs from the first one asked for.

        Leaving the iterator early (`close`, or dropping it) aborts what is in flight. Raises as `run` does.
        """
        options = self._options.changed(overrides)
        self._core.refuse_if_closed()

        def events() -> Generator[Event, None, None]:
            queue: SimpleQueue[Event | None] = SimpleQueue()
            job = self._begin(lambda: _feed(self._run(query, options, queue.put), queue.put))
            try:
                while (event := queue.get()) is not None:
                    yield event
                job.wait()
            finally:
                job.end()

        return events()

    async def astream(self, query: Askable, **overrides: Any) -> AsyncGenerator[Event, None]:
        """Like `stream`, asynchronously; close it with `aclose` to abort early."""
        options = self._options.changed(overrides)
        bound = await bind_query(query)
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(event: Event | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)

        job = self._begin(lambda: _feed(self._run_bound(bound, options, put), put))
        try:
            while (event := await queue.get()) is not None:
                yield event
            await job.join()
        finally:
            await job.aend()

    def run_many(self, queries: Iterable[Askable], **overrides: Any) -> list[Result]:
        """Run queries at once, within the bound on what is in flight; results come in the order of the queries.

        The first query that fails ends all of them; its error has the results of those that were done in `results`.
        """
        options = self._options.changed(overrides)
        asked = list(queries)
        return self._begin(lambda: _all([self._run(query, options) for query in asked])).wait()

    async def arun_many(self, queries: Iterable[Askable], **overrides: Any) -> list[Result]:
        """Like `run_many`; retrievers that are asynchronous run on the calling loop."""
        options = self._options.changed(overrides)
        bound = await asyncio.gather(*[bind_query(query) for query in queries])
        return await self._begin(lambda: _all([self._run_bound(query, options) for query in bound])).join()

    # Looking inside.

    def explain(self, query: Askable, **overrides: Any) -> Explanation:
        """What the query becomes, and what it costs: as the engine stands, where it runs, and bounds.

        Needs the model's tokenizer, and starts no engine. Raises QueryError, ModelError.
        """
        options = self._options.changed(overrides)
        return self._begin(lambda: self._explain(query, options)).wait()

    def prefetch(self, query: Askable, **overrides: Any) -> int:
        """Compute the KV of a query's documents before it is asked, as one would for a corpus; how many are kept.

        Those are the texts in its commutes, at any depth, whose anchor is a header or nothing. The query itself is
        not run, and may be larger than the window; a document that is as long as the window is not kept. Raises
        QueryError.
        """
        options = self._options.changed(overrides)
        return self._begin(lambda: self._prefetch(query, options)).wait()

    async def aprefetch(self, query: Askable, **overrides: Any) -> int:
        """Like `prefetch`; retrievers that are asynchronous run on the calling loop."""
        options = self._options.changed(overrides)
        bound = await bind_query(query)
        return await self._begin(lambda: self._prefetch(bound, options)).join()

    async def aexplain(self, query: Askable, **overrides: Any) -> Explanation:
        """Like `explain`; retrievers that are asynchronous run on the calling loop."""
        options = self._options.changed(overrides)
        bound = await bind_query(query)
        return await self._begin(lambda: self._explain(bound, options)).join()

    @property
    def model(self) -> str:
        """The model's name, as it was given."""
        return self._core.choice.model

    @property
    def engine(self) -> str:
        """The engine's name, as it was given."""
        return self._core.choice.engine

    @property
    def engine_options(self) -> Mapping[str, Any]:
        """The engine's own options, as they were given."""
        return MappingProxyType(dict(self._core.choice.options))

    @property
    def options(self) -> RunOptions:
        """The options of its runs, unless a run says otherwise."""
        return self._options

    @property
    def info(self) -> EngineInfo:
        """What the engine is, and whether it serves spans; starts it."""
        return self.on_host(_info)

    def say(self, text: str) -> None:
        """Tell progress where this session tells it."""
        self._say(text)

    def on_host(self, work: Callable[[Host], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the engine's event loop, for diagnosis; starts the engine."""

        async def begin() -> T:
            host = await self._core.host()
            await host.settle()
            return await work(host)

        return self._begin(begin).wait()

    # Starting and closing.

    def close(self) -> None:
        """Stop the engine; what is in flight is aborted and raises EngineDied. Idempotent."""
        self._close()

    async def aclose(self) -> None:
        """Like `close`, without blocking the calling loop."""
        await asyncio.to_thread(self._close)

    def __enter__(self) -> Self:
        try:
            self._begin(self._core.host).wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await self._begin(self._core.host).join()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # Inside.

    def _begin(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Job[T]:
        return self._core.start(make)

    async def _run(self, query: Askable, options: RunOptions, emit: Emit | None = None) -> Result:
        return await self._run_bound(await bind_query(query), options, emit)

    async def _run_bound(self, query: Node, options: RunOptions, emit: Emit | None = None) -> Result:
        try:
            compiled = await self._compile(query, options)
            host = await self._core.host()
            tell = Telling(self._say, len(compiled.plan.order))
            async with aclosing(run_plan(compiled.plan, host, options)) as events:
                async for event in events:
                    tell(event)
                    if emit is not None:
                        emit(event)
                    if isinstance(event, Done):
                        return event.result
        except asyncio.CancelledError:
            if self._core.is_closed:
                raise EngineDied("the session was closed while this query ran; open another one to run it") from None
            raise
        raise AssertionError("a run ends with its result or an error")

    async def _prefetch(self, query: Askable, options: RunOptions) -> int:
        compiled = await self._compile(await bind_query(query), options)
        host = await self._core.host()
        return await prefetch(compiled.plan, compiled.plan.inner, host, options, host.new_run())

    async def _compile(self, query: Node, options: RunOptions) -> Compiled:
        model = self._core.choice.model
        return await asyncio.to_thread(
            compile_query, query, options, model=model, adapters=self._adapters, hint=self._order_hint
        )

    async def _explain(self, query: Askable, options: RunOptions) -> Explanation:
        compiled = await self._compile(await bind_query(query), options)
        template, window = await self._core.template()
        known = await asyncio.to_thread(lower_known, compiled.plan, template, options)
        predictions: dict[str, Prediction | str] | None = None
        why, host = "", self._core.running
        if host is not None:
            why = host.engine.info.spans_unsupported
            lowered = [(each.generation, each.lowered) for each in known if each.lowered is not None]
            predictions = await predict(lowered, host, options)
        return explain(compiled, known, options, window=window, spans_unsupported=why, predictions=predictions)


async def _feed(run: Coroutine[Any, Any, Result], put: Callable[[Event | None], None]) -> None:
    """Run, and say when no event will come any more."""
    try:
        await run
    finally:
        put(None)


async def _all(runs: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order; the first error ends what still runs."""
    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    except Exception as error:
        done = [task.done() and not task.cancelled() and task.exception() is None for task in tasks]
        with suppress(AttributeError):  # an error of somebody else's may take no attributes
            error.results = tuple(  # type: ignore[attr-defined]
                task.result() if ok else None for task, ok in zip(tasks, done, strict=True)
            )
        raise
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _info(host: Host) -> EngineInfo:
    return host.engine.info
