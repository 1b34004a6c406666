"""An engine without a model whose every step the test decides, and which remembers what it was asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
from lowering.families import FAMILIES
from lowering.tiny import TinyTokenizer

from spanflow.engine import registry
from spanflow.engine.protocol import (
    EngineInfo,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Prediction,
    SpanReport,
    Usage,
)


class SpeakingTokenizer(TinyTokenizer):
    """The tiny ChatML tokenizer, whose `decode` can leave control tokens out."""

    def __init__(self) -> None:
        family = FAMILIES["chatml"]
        super().__init__(family.text, ("<|im_start|>", "<|im_end|>"), family.bos, family.eos)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return super().decode([token for token in ids if not (skip_special_tokens and token < 2)])


@dataclass
class Script:
    """What the engine does, and what it saw.

    `answer` gives the text for a request, or an error to raise after `errors_after` tokens. `seconds` pass before
    each token; a request that `hangs` never gets one. `why_exact` gives the reason why spans of a request run with full
    attention. `finish` is the reason given at the end.
    """

    answer: Callable[[EngineRequest], str | Exception] = lambda request: " fine"
    seconds: float = 0.0
    hangs: Callable[[EngineRequest], bool] = lambda request: False
    finish: FinishReason = "stop"
    errors_after: int = 0
    window: int = 1000
    unsupported: str = ""
    why_exact: Callable[[EngineRequest], str] = lambda request: ""
    tokenizer: SpeakingTokenizer = field(default_factory=SpeakingTokenizer)
    submitted: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    prefetched: list[EngineRequest] = field(default_factory=list)
    prefetch_error: Exception | None = None
    prediction: Prediction | Exception | None = None
    running: set[str] = field(default_factory=set)
    most_running: int = 0
    num_starts: int = 0
    num_closes: int = 0
    start_error: Exception | None = None

    def texts(self, requests: list[EngineRequest] | None = None) -> list[str]:
        """The prompts in the order in which they were submitted, or of other requests."""
        return [self.tokenizer.decode(r.prompt.token_ids) for r in (self.submitted if requests is None else requests)]


class ScriptedEngine:
    """An `Engine` that follows a script."""

    def __init__(self, model: str, script: Script) -> None:
        self.script = script
        self.info = EngineInfo("scripted", model, script.window, 16, script.unsupported)

    @classmethod
    async def start(cls, model: str, *, script: Script, adapters: Any = None, progress: Any = None) -> ScriptedEngine:
        script.num_starts += 1
        if script.start_error is not None:
            raise script.start_error
        return cls(model, script)

    @property
    def tokenizer(self) -> SpeakingTokenizer:
        return self.script.tokenizer

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        script = self.script
        script.submitted.append(request)
        script.running.add(request.request_id)
        script.most_running = max(script.most_running, len(script.running))
        finished = False
        try:
            if script.hangs(request):
                await asyncio.Event().wait()
            said = script.answer(request)
            ids = self.tokenizer.encode(said if isinstance(said, str) else " so" * script.errors_after, False)
            ids = ids[: request.sampling.max_tokens]
            shown, stops = self.tokenizer.decode(ids), request.sampling.stop
            end = min((shown.find(stop) for stop in stops if stop in shown), default=len(shown))
            for number, token in enumerate(ids, 1):
                await asyncio.sleep(script.seconds)
                before = len(self.tokenizer.decode(ids[: number - 1]))
                text = shown[min(before, end) : min(len(self.tokenizer.decode(ids[:number])), end)]
                if number == len(ids) and isinstance(said, str):
                    finished = True
                    usage = Usage(len(request.prompt), number)
                    yield EngineOutput(text, (token,), (), script.finish, usage, self._reports(request))
                    return
                yield EngineOutput(text, (token,))
            if isinstance(said, Exception):
                finished = True
                raise said
        finally:
            script.running.discard(request.request_id)
            if not finished:
                script.aborted.append(request.request_id)

    def _reports(self, request: EngineRequest) -> tuple[SpanReport, ...]:
        if why := self.script.why_exact(request):
            spans = request.prompt.spans
            return tuple(SpanReport(s.start, s.end, "unsupported", computed=len(s), why=why) for s in spans)
        return tuple(SpanReport(s.start, s.end, "hit", moved=len(s)) for s in request.prompt.spans)

    async def predict(self, request: EngineRequest) -> Prediction | None:
        if isinstance(self.script.prediction, Exception):
            raise self.script.prediction
        return self.script.prediction

    async def prefetch(self, request: EngineRequest) -> bool:
        if self.script.prefetch_error is not None:
            raise self.script.prefetch_error
        self.script.prefetched.append(request)
        return len(request.prompt) < self.script.window

    async def release(self, request_ids: tuple[str, ...]) -> None:
        self.script.released += request_ids

    async def audit(self) -> Mapping[str, Any]:
        return {"running": len(self.script.running), "problems": []}

    async def reset(self) -> None:
        """There is nothing to forget."""

    async def close(self) -> None:
        self.script.num_closes += 1


async def until(condition: Callable[[], Any]) -> None:
    """Wait until something has come about, five seconds at most."""
    async with asyncio.timeout(5):
        await asyncio.sleep(0)
        while not condition():  # noqa: ASYNC110 - what is waited for happens on another thread
            await asyncio.sleep(0.005)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `Session(engine="scripted", script=...)` work for the length of a test."""
    known = {**registry.ENGINES, "scripted": registry.Factory("scripted_engine", "ScriptedEngine")}
    monkeypatch.setattr(registry, "ENGINES", MappingProxyType(known))
