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
) -> dict[str, Prediction | str]:
    """The engine's word on each prompt by itself, by the path of its generate.

    Where it would refuse the prompt, or has stopped, what it says to that; '' where it cannot tell.
    """
    run, window = host.new_run(), host.engine.info.max_model_len

    async def one(generation: Generation, lowered: Lowered) -> Prediction | str:
        try:
            name = f"{run}/predict-{generation.path}"
            request = request_for(generation, lowered, options, name=name, window=window)
            return await host.engine.predict(request) or ""
        except SpanflowError as error:  # which a run would raise; an explanation says all that it can
            return str(error)

    asked = {generation.path: one(generation, lowered) for generation, lowered in prompts}
    return dict(zip(asked, await asyncio.gather(*asked.values()), strict=True))
