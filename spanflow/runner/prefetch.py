"""Documents of generations that still wait for answers: their KV is computed meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from spanflow.engine.protocol import EngineRequest
from spanflow.errors import SpanflowError
from spanflow.ir.nodes import Sampling
from spanflow.lowering.lower import Generated, Lowered
from spanflow.lowering.prompt import SpanPrompt
from spanflow.plan.graph import Plan
from spanflow.runner.host import Host
from spanflow.runner.options import RunOptions


async def prefetch(plan: Plan, paths: Iterable[str], host: Host, options: RunOptions, run: str) -> int:
    """Compute the KV of the text spans in the prompts of the generates at `paths`, each once; how many there were.

    Answers that are not there yet are left out of the prompts: what stands behind a header or nothing at all does
    not depend on them. Failures are left to the generations themselves.
    """
    done: set[bytes] = set()
    for path in paths:
        lowered = await _lower(plan, path, host, options)
        for source in _sources(lowered) if lowered is not None else ():
            if source.digest in done:
                continue
            done.add(source.digest)
            name = f"{run}/prefetch-{len(done)}"
            request = EngineRequest(name, source, Sampling(1), salt=options.salt, priority=options.priority)
            with suppress(SpanflowError):
                await host.engine.prefetch(request)
    return len(done)


async def _lower(plan: Plan, path: str, host: Host, options: RunOptions) -> Lowered | None:
    silence = Generated(SpanPrompt((0,)), (), "")
    generated = {inner: (silence,) * len(plan.samples(inner)) for inner in plan.inner[path]}
    node = plan.samples(path)[0].node
    if node.model not in (None, host.model):
        return None  # another adapter's KV is asked for by its own requests
    with suppress(SpanflowError):
        return await host.lower(node.query, generated, path, options)
    return None


def _sources(lowered: Lowered) -> list[SpanPrompt]:
    """What is computed to get a span: its anchor and itself."""
    prompt = lowered.prompt
    return [
        SpanPrompt(span.anchor.token_ids + prompt.tokens(span), span.anchor.spans)
        for span, source in zip(prompt.spans, lowered.sources, strict=True)
        if source.anchor in ("header", "none") and span.repair < len(span)
    ]
