"""Two engines side by side, stock vLLM and ours, and the time that one request takes to its first token."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks._cores import bound_cores, descendants
from benchmarks._resident import resident_pools
from spanflow.engine.models import resolve_model
from spanflow.engine.protocol import Engine, EngineRequest, Lease, SpanReport, Usage
from spanflow.engine.vllm.client import VllmEngine
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import SpanPrompt
from spanflow.lowering.template import ChatTemplate

_NAMES = itertools.count()
#: vLLM's processes look for work in a loop for a second after the last, and take a core from the other engine's.
_SETTLE = 1.2
#: An engine that has been idle takes a tenth of a second longer for its first step: this one is not timed.
_WAKE = SpanPrompt((1,))


@dataclass(frozen=True, slots=True)
class Answer:
    """One request to its end. `ttft`: seconds from handing it over to its first token. `tops`: for the first token,
    log-probabilities of the most likely ones, where asked for."""

    name: str
    ttft: float
    text: str
    token_ids: tuple[int, ...]
    tops: dict[int, float]
    usage: Usage
    spans: tuple[SpanReport, ...]

    @property
    def num_hit(self) -> int:
        """How many spans were found in the cache."""
        return sum(span.status == "hit" for span in self.spans)

    @property
    def num_lost(self) -> int:
        """How many spans should have been found there and were not; one that is repaired whole is not looked for."""
        return sum(span.status in ("new", "evicted") for span in self.spans)

    @property
    def num_wanted(self) -> int:
        """How many spans are looked for."""
        return sum(span.status != "computed" for span in self.spans)


class Pair:
    """Stock vLLM and ours on one model with the same options, both alive; only one of them works at a time.

    Whoever takes a turn waits until the other one's processes have gone to sleep, and runs a step to wake its own.
    `note` says on how many cores each computes, where that is known.
    """

    def __init__(self, stock: Engine, ours: Engine, template: ChatTemplate, note: str = "") -> None:
        self.stock = stock
        self.ours = ours
        self.template = template
        self.note = note
        self._at_work: Engine | None = None

    async def ask(self, engine: Engine, prompt: SpanPrompt, **options: Any) -> Answer:
        """Run one request alone, and time its first token. Options are those of `Sampling` and `EngineRequest`."""
        await self._take_turn(engine)
        return await _run(engine, prompt, **options)

    async def ask_all(
        self, engine: Engine, prompts: Sequence[SpanPrompt], seeds: Sequence[int] | None = None, **options: Any
    ) -> list[Answer]:
        """All prompts at once; answers in order. Their times say nothing of one request alone."""
        await self._take_turn(engine)
        each: Sequence[int | None] = [None] * len(prompts) if seeds is None else seeds
        asked = (_run(engine, prompt, seed=seed, **options) for prompt, seed in zip(prompts, each, strict=True))
        return list(await asyncio.gather(*asked))

    async def begin(self, engine: Engine, head: SpanPrompt) -> None:
        """Empty an engine's cache, but for what a prompt of the head alone, which all prompts share, leaves there."""
        await self._take_turn(engine)
        await engine.reset()
        await _run(engine, head)

    async def move_seconds(self) -> float:
        """The seconds that our worker has spent in moves so far."""
        await self._take_turn(self.ours)
        counts = await self.ours.audit()
        if problems := counts["problems"]:
            raise RuntimeError(f"the engine's books are wrong: {'; '.join(problems)}")
        return float(counts.get("move_microseconds", 0)) / 1e6

    async def _take_turn(self, engine: Engine) -> None:
        if self._at_work is engine:
            return
        if self._at_work is not None:
            await asyncio.sleep(_SETTLE)
        self._at_work = engine
        await _run(engine, _WAKE)


@asynccontextmanager
async def started_pair(model: str, *, cores: str, **options: Any) -> AsyncIterator[Pair]:
    """Start both engines, and stop them in the end. `cores`: what they compute on, one of `_options.CORES`.

    Raises what an engine's start raises; SpansUnsupported too.
    """
    if cores == "same":
        _give_both_all_cores()
    directory = str(resolve_model(model, progress=say))
    begun = time.perf_counter()
    ours = await VllmEngine.start(directory, require_spans=True, **options)
    try:
        processes = descendants()
        stock = await VllmEngine.start(directory, spans=False, **options)
        try:
            say(f"both engines are up after {time.perf_counter() - begun:.0f} s")
            from spanflow.engine.vllm.arguments import is_cpu  # loads vLLM, which the engines have done by now

            note = ""
            if is_cpu():
                _check_pools(float(options["kv_cache_gib"]))
                note = cores_note(bound_cores(descendants() - processes), bound_cores(processes))
            yield Pair(stock, ours, ChatTemplate(ours.tokenizer), note)
        finally:
            await stock.close()
    finally:
        await ours.close()


def _check_pools(gib: float) -> None:
    """Both KV pools are in memory now, or the first to touch a page would pay for it. Raises RuntimeError."""
    found = resident_pools(int(0.95 * gib * (1 << 30)))  # a pool is of whole blocks, so a little less
    if found < 2:
        raise RuntimeError(
            f"{found} of 2 engines hold a KV pool of {gib:g} GiB in memory; free some memory, or give a smaller "
            "--kv-gib"
        )


def cores_note(stock: int, ours: int) -> str:
    """What to know of the cores that both compute on; 0: it is not known."""
    if not stock or not ours:
        return "on how many cores each engine computes is not known"
    said = f"stock computes on {stock} core{'s' * (stock != 1)}, ours on {ours}"
    if stock == ours:
        return said
    return f"{said}, as vLLM decides by itself; give both all of them with --cores same"


def _give_both_all_cores() -> None:
    """Let both engines compute on all cores; what the user set stays.

    Left alone on two cores, stock would compute on one of them, and ours on both (see `cores_left_free`).
    """
    os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def say(text: str) -> None:
    """Progress, beside the result."""
    print(f"... {text}", file=sys.stderr, flush=True)


def plain(prompt: SpanPrompt) -> SpanPrompt:
    """The same tokens without spans: what stock vLLM is given, and full attention on ours."""
    return SpanPrompt(prompt.token_ids)


def check_found(answer: Answer, what: str, *, num_shared: int = 0, may_hit: bool = True) -> Answer:
    """The answer, if its prompt was new to the cache, but for `num_shared` tokens and for spans, if these may hit.

    Raises RuntimeError otherwise: what another prompt left there would count as speed.
    """
    if answer.num_hit and not may_hit:
        raise RuntimeError(
            f"{what}: {answer.num_hit} of {len(answer.spans)} spans were in the cache, expected none; "
            "it was not emptied, so the time says nothing"
        )
    # A head that was computed ahead of its prompt counts as cached, and as internal.
    num_found = answer.usage.cached - sum(span.moved for span in answer.spans) - answer.usage.internal
    if num_found > num_shared:
        raise RuntimeError(
            f"{what}: {num_found} tokens outside of spans were in the cache, expected at most {num_shared}; "
            "another prompt began alike, so the time says nothing"
        )
    return answer


async def _run(
    engine: Engine,
    prompt: SpanPrompt,
    *,
    max_tokens: int = 1,
    temperature: float = 0.0,
    seed: int | None = None,
    logprobs: int | None = None,
    lease: Lease | None = None,
) -> Answer:
    """Run one request and time its first token."""
    name = f"benchmark-{next(_NAMES)}"
    sampling = Sampling(max_tokens, temperature=temperature, seed=seed)
    request = EngineRequest(name, prompt, sampling, lease=lease, logprobs=logprobs)
    text, token_ids, tops = "", (), {}  # type: str, tuple[int, ...], dict[int, float]
    usage, spans = Usage(), ()  # type: Usage, tuple[SpanReport, ...]
    first: float | None = None
    begun = time.perf_counter()
    async for piece in engine.stream(request):
        if first is None and piece.token_ids:
            first = time.perf_counter() - begun
            tops = dict(piece.logprobs[0]) if piece.logprobs else {}
        text, token_ids = text + piece.text, token_ids + piece.token_ids
        usage, spans = piece.usage or usage, piece.spans or spans
    if first is None:
        raise RuntimeError(f"{name}: the engine gave no token for a prompt of {len(prompt)} tokens")
    return Answer(name, first, text, token_ids, tops, usage, spans)
