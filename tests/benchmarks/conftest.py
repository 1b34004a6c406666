"""Two simulated engines in place of two real ones, which also make up likelihoods of a first token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import SpeakingTokenizer

from benchmarks import _engines
from benchmarks._engines import Pair
from spanflow.engine.protocol import EngineOutput, EngineRequest
from spanflow.engine.simulator import SimulatorEngine
from spanflow.lowering.template import ChatTemplate


class RankingSimulator(SimulatorEngine):
    """Its first token has even odds; token 7 has a quarter, and the rest is not told."""

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        number = 0
        async for piece in super().stream(replace(request, logprobs=None)):
            number += 1
            if request.logprobs and number == 1:
                piece = replace(piece, logprobs=({piece.token_ids[0]: -0.7, 7: -1.4},))
            yield piece


@pytest.fixture
def make_pair(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[Pair]]:
    """Starts stock and ours, both simulated, with one tokenizer, on the loop that asks."""
    monkeypatch.setattr(_engines, "_SETTLE", 0)  # there are no threads to wait for

    async def make() -> Pair:
        tokenizer = SpeakingTokenizer()
        options: dict[str, Any] = {"tokenizer": tokenizer, "num_blocks": 4096}
        stock, ours = await RankingSimulator.start(**options), await RankingSimulator.start(**options)
        return Pair(stock, ours, ChatTemplate(tokenizer))

    return make


@pytest.fixture
async def pair(make_pair: Callable[[], Awaitable[Pair]]) -> AsyncIterator[Pair]:
    """Two simulated engines; the books of ours are checked in the end."""
    pair = await make_pair()
    yield pair
    assert (await pair.ours.audit())["problems"] == []
