"""What a running engine would find if the generations of a plan ran now."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from spanflow.engine.protocol import Prediction
from spanflow.errors import SpanflowError
from spanflow.lowering.lower import Lowered
from spanflow.plan.graph import Generation
from spanflow.runner.ask import request_for
from spanflow.runner.host import Host
from spanflow.runner.options import RunOptions


async def predict(
    prompts: Iterable[tuple[Generation, Lowered]], host: Host, options: RunOptions
) -> dict[str, Prediction]:
    """The engine's word on each prompt by itself, by the path of its generate.

    Left out where it cannot tell, or would refuse the prompt, or has stopped.
    """
    run, window = host.new_run(), host.engine.info.max_model_len

    async def one(generation: Generation, lowered: Lowered) -> Prediction | None:
        try:
            name = f"{run}/predict-{generation.path}"
            return await host.engine.predict(request_for(generation, lowered, options, name=name, window=window))
        except SpanflowError:  # which a run would raise; an explanation says all that it can
            return None

    asked = {generation.path: one(generation, lowered) for generation, lowered in prompts}
    found = await asyncio.gather(*asked.values())
    return {path: prediction for path, prediction in zip(asked, found, strict=True) if prediction is not None}
