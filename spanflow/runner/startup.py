"""An engine on a background loop: started once, when it is first needed, and stopped once."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from spanflow.engine import registry
from spanflow.engine.models import resolve_model
from spanflow.engine.tokenizer import load_hf_tokenizer
from spanflow.errors import EngineUnavailable, SpansUnsupported
from spanflow.lowering.template import ChatTemplate
from spanflow.runner.background import Background, Job
from spanflow.runner.host import Host

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """Which engine to start, on which model, and how."""

    engine: str
    model: str
    require_spans: bool
    max_concurrency: int
    options: Mapping[str, Any]
    say: Callable[[str], None]

    async def start(self) -> Host:
        """Start the engine. Raises EngineUnavailable, ModelError, SpansUnsupported, QueryError for an option."""
        model, options = self.model, dict(self.options)
        if self.engine == "vllm":
            # Taken apart here, so that a model that does not exist is named as the caller named it.
            model = str(await asyncio.to_thread(resolve_model, model, progress=self.say))
            options["require_spans"] = self.require_spans
        engine = await registry.start_engine(self.engine, model, progress=self.say, **options)
        try:
            if self.require_spans and engine.info.spans_unsupported:
                raise SpansUnsupported(
                    f"spans can't be served exactly by engine {self.engine!r} for {self.model}: "
                    f"{engine.info.spans_unsupported}. Use another model, or open the session without require_spans"
                )
            template = ChatTemplate(await asyncio.to_thread(getattr, engine, "tokenizer"))
        except BaseException:
            await engine.close()
            raise
        return Host(
            engine,
            template,
            model=self.model,
            max_concurrency=self.max_concurrency,
            require_spans=self.require_spans,
        )

    def load_template(self) -> tuple[ChatTemplate, int | None]:
        """The chat template and the window, from the model's files alone. Raises ModelError, EngineUnavailable."""
        given, window = self.options.get("tokenizer"), self.options.get("max_model_len")
        if given is not None and not isinstance(given, str):
            return ChatTemplate(given), window
        tokenizer, trained_window = load_hf_tokenizer(self.model, progress=self.say, options=self.options)
        return ChatTemplate(tokenizer), window or trained_window


class Core:
    """What a session owns and its finalizer may hold: the loop's thread, and the engine when there is one."""

    def __init__(self, choice: EngineChoice) -> None:
        if choice.engine not in registry.ENGINES:
            known = ", ".join(sorted(registry.ENGINES))
            raise EngineUnavailable(f"no engine is called {choice.engine!r}; known engines: {known}")
        self.choice = choice
        self.is_closed = False
        self._lock = threading.Lock()
        self._background: Background | None = None
        self._starting = asyncio.Lock()
        self._loading = asyncio.Lock()
        self._host: Host | None = None
        self._template: tuple[ChatTemplate, int | None] | None = None

    def start(self, make: Callable[[], Coroutine[Any, Any, T]]) -> Job[T]:
        """Begin work on the background loop. Raises EngineUnavailable when closed, RuntimeError on the loop itself."""
        with self._lock:
            self.refuse_if_closed()
            if self._background is None:
                self._background = Background("spanflow-session")
            background = self._background
        if background.is_here():
            raise RuntimeError(
                "a session was used from its own event loop, where waiting for it would last for ever; call it from "
                "another thread, for example with asyncio.to_thread"
            )
        try:
            return background.start(make())
        except RuntimeError:  # closed in the meantime, by another thread
            self.refuse_if_closed()
            raise

    def refuse_if_closed(self) -> None:
        """Raises EngineUnavailable when closed."""
        if self.is_closed:
            raise EngineUnavailable("this session is closed; open another one with Session(...)")

    async def host(self) -> Host:
        """The started engine; starts it. A start that failed is tried again the next time."""
        async with self._starting:
            if self._host is None:
                self._host = await self.choice.start()
                # Registered behind all that the engine registered, so that at exit it is closed before its parts are.
                atexit.register(self.close)
            return self._host

    async def template(self) -> tuple[ChatTemplate, int | None]:
        """The chat template and the window: the engine's where it runs, else from the model's files."""
        if self._host is not None:
            return self._host.template, self._host.engine.info.max_model_len
        async with self._loading:
            if self._template is None:
                self._template = await asyncio.to_thread(self.choice.load_template)
            return self._template

    @property
    def running(self) -> Host | None:
        """The engine, where it has been started."""
        return self._host

    def close(self) -> None:
        """Abort what is in flight, stop the engine and its loop. Idempotent."""
        atexit.unregister(self.close)
        with self._lock:
            self.is_closed = True
            background, self._background = self._background, None
        if background is not None:
            background.stop(self._end)

    async def _end(self) -> None:
        async with self._starting:  # a start that was cancelled stops what it has started
            pass
        host, self._host = self._host, None
        if host is not None:
            await host.settle()
            await host.engine.close()
