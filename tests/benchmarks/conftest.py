"""Two simulated engines in place of two real ones, which also make up likelihoods of a first token."""

from __future__ import annotations

from collections.abc import AsyncIterator
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
async def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stock and ours, both simulated, of the same tokenizer."""
    monkeypatch.setattr(_engines, "_SETTLE", 0)  # there are no threads to wait for
    tokenizer = SpeakingTokenizer()
    options: dict[str, Any] = {"tokenizer": tokenizer, "num_blocks": 4096}
    stock, ours = await RankingSimulator.start(**options), await RankingSimulator.start(**options)
    yield Pair(stock, ours, ChatTemplate(tokenizer))
    assert (await ours.audit())["problems"] == []
