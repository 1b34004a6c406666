"""Turns of the two engines, and the cores that both compute on."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from benchmarks import _engines
from benchmarks._engines import Pair
from spanflow.errors import ModelError
from spanflow.lowering.prompt import SpanPrompt


async def test_only_a_change_of_turns_waits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engines, "_SETTLE", 0.75)
    waits: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        waits.append(seconds)
        await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", noted)
    prompt = SpanPrompt((2, 3, 4))
    turns = [pair.stock, pair.stock, pair.ours, pair.ours, pair.stock]
    changes = []
    for engine in turns:
        await pair.ask(engine, prompt)
        changes.append(waits.count(0.75))
    assert changes == [0, 0, 1, 1, 2]
    await pair.ask_all(pair.ours, [prompt, prompt])
    await pair.move_seconds()
    assert waits.count(0.75) == 3


def test_both_engines_get_all_cores_unless_the_user_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")  # so that it is put back in the end
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU")
    _engines._give_both_all_cores()
    assert os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "0"
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "3")
    _engines._give_both_all_cores()
    assert os.environ["VLLM_CPU_NUM_OF_RESERVED_CPU"] == "3"


@pytest.mark.parametrize(("cores", "reserved"), [("same", "0"), ("vllm", None)])
async def test_cores_are_those_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, cores: str, reserved: str | None
) -> None:
    monkeypatch.setenv("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")  # so that it is put back in the end
    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU")
    seen: list[str | None] = []

    async def start(*_: Any, **options: Any) -> Any:
        assert options == {"require_spans": True, "kv_cache_gib": 1.0}
        seen.append(os.environ.get("VLLM_CPU_NUM_OF_RESERVED_CPU"))
        raise ModelError("no model")

    monkeypatch.setattr(_engines.VllmEngine, "start", start)
    monkeypatch.setattr(_engines, "resolve_model", lambda model, progress: model)
    with pytest.raises(ModelError, match="no model"):
        async with _engines.started_pair("m", cores=cores, kv_cache_gib=1.0):
            pass
    assert seen == [reserved]
