"""Documents of generations that still wait for answers: their KV is computed meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress

from spanflow.engine.protocol import EngineRequest
from spanflow.errors import QueryError, SpanflowError
from spanflow.ir.nodes import Sampling
from spanflow.lowering.lower import Lowered
from spanflow.lowering.prompt import SpanPrompt
from spanflow.plan.graph import Generation, Plan
from spanflow.runner.host import Host
from spanflow.runner.options import RunOptions


async def prefetch(
    plan: Plan, paths: Iterable[str], host: Host, options: RunOptions, run: str, *, is_hint: bool = False
) -> int:
    """Compute the KV of the text spans in the prompts of the generates at `paths`, each once; how many are kept.

    Answers that are not there yet are left out of the prompts: what stands behind a header or nothing at all does not
    depend on them. A text as long as the window is not kept. Raises QueryError, EngineDied. `is_hint`: one after
    the other, and failures are left to the generations themselves.
    """
    if host.engine.info.spans_unsupported:
        return 0
    requests: dict[tuple[bytes, str | None], EngineRequest] = {}
    for path in paths:
        generation = plan.samples(path)[0]
        adapter = generation.node.model
        with suppress(*([QueryError] if is_hint else [])):
            for source in _sources(await _lower(plan, generation, host, options)):
                name = f"{run}/prefetch-{len(requests)}"
                request = EngineRequest(name, source, Sampling(1), None, options.salt, adapter, options.priority)
                requests.setdefault((source.digest, adapter), request)
    if is_hint:
        num_kept = 0
        for request in requests.values():
            with suppress(SpanflowError):
                num_kept += await host.engine.prefetch(request)
        return num_kept
    tasks = [asyncio.ensure_future(_in_turn(request, host)) for request in requests.values()]
    try:
        return sum(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _in_turn(request: EngineRequest, host: Host) -> bool:
    async with host.slots:
        return await host.engine.prefetch(request)


async def _lower(plan: Plan, generation: Generation, host: Host, options: RunOptions) -> Lowered:
    return await host.lower(generation.node.query, plan.not_yet(generation.path), generation.path, options)


def _sources(lowered: Lowered) -> list[SpanPrompt]:
    """What is computed to get a span: its anchor and itself."""
    prompt = lowered.prompt
    return [
        span.anchor.followed_by(prompt.tokens(span))
        for span, source in zip(prompt.spans, lowered.sources, strict=True)
        if source.anchor in ("header", "none") and span.repair < len(span)
    ]
