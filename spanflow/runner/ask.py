"""One attempt at one generation: the request, the pieces of its answer, and what is kept of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

from spanflow.engine.protocol import EngineOutput, EngineRequest, FinishReason, Lease, SpanReport, Usage
from spanflow.errors import GenerationFailed, GenerationTimeout, PromptTooLong
from spanflow.ir.nodes import Sampling
from spanflow.lowering.lower import Lowered
from spanflow.plan.graph import Generation
from spanflow.runner.options import RunOptions


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered. Times are those of `time.perf_counter`, in seconds."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    spans: tuple[SpanReport, ...]
    begun: float
    first: float
    ended: float


def request_for(
    generation: Generation, lowered: Lowered, options: RunOptions, *, name: str, window: int
) -> EngineRequest:
    """What to ask the engine for. Raises PromptTooLong."""
    node = generation.node
    return EngineRequest(
        name,
        lowered.prompt,
        _sampling(generation, lowered, options, window),
        lease=Lease(len(generation.consumers), options.lease_seconds) if generation.is_leased else None,
        salt=options.salt,
        adapter=node.model,
        priority=options.priority,
    )


def _sampling(generation: Generation, lowered: Lowered, options: RunOptions, window: int) -> Sampling:
    sampling = generation.node.sampling
    num_tokens = len(lowered.prompt)
    room = window - num_tokens
    if room < (sampling.max_tokens or 1):
        raise PromptTooLong(num_tokens, sampling.max_tokens or 1, window, generation.path)
    max_tokens = sampling.max_tokens or min(options.max_tokens, room)
    return replace(sampling, max_tokens=max_tokens, seed=generation.seed)


async def ask(
    stream: Callable[[EngineRequest], Any],
    request: EngineRequest,
    *,
    where: str,
    within: float | None,
    on_text: Callable[[str], None],
) -> Answer:
    """Run one request to its end; `on_text` sees each piece of text as it comes.

    Cancelling this leaves the engine's stream, which aborts the request. Raises what the engine raises,
    GenerationTimeout after `within` seconds, and GenerationFailed where the engine ends the answer without a result;
    both begin with `where`.
    """
    begun = time.perf_counter()
    first: float | None = None
    texts: list[str] = []
    token_ids: list[int] = []
    last: EngineOutput | None = None
    limit = asyncio.timeout(within)
    try:
        async with limit, aclosing(cast("AsyncGenerator[EngineOutput, None]", stream(request))) as pieces:
            async for piece in pieces:
                if first is None and piece.token_ids:
                    first = time.perf_counter()
                token_ids += piece.token_ids
                last = piece
                if piece.text:
                    texts.append(piece.text)
                    on_text(piece.text)
                if piece.finish_reason is not None:
                    break
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise GenerationTimeout(
            f"{where}: no whole answer within {within:g} s ({len(token_ids)} tokens so far); allow more time with "
            "timeout=..., or ask for less with max_tokens=..."
        ) from error
    ended = time.perf_counter()
    if last is None or last.finish_reason is None:
        raise GenerationFailed(f"{where}: the engine ended the answer after {len(token_ids)} tokens without a reason")
    if last.finish_reason in ("abort", "error"):
        what = "aborted the request" if last.finish_reason == "abort" else "failed on the request"
        raise GenerationFailed(
            f"{where}: the engine {what} after {len(token_ids)} tokens" + (f": {last.error}" if last.error else "")
        )
    usage = last.usage or Usage(len(request.prompt), len(token_ids))
    first = ended if first is None else first
    return Answer("".join(texts), tuple(token_ids), last.finish_reason, usage, last.spans, begun, first, ended)


def kept_ids(decode: Callable[[list[int]], str], token_ids: Sequence[int], text: str) -> tuple[int, ...]:
    """The longest beginning of the ids whose text is a beginning of `text`.

    A stop string ends an answer's text before its ids: what comes behind it is not said.
    """
    for number in range(len(token_ids), 0, -1):
        if text.startswith(decode(list(token_ids[:number]))):
            return tuple(token_ids[:number])
    return ()
