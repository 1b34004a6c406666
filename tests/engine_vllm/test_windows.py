"""How long a prompt may be, by the room for its KV; and what becomes of requests whose engine is closed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spanflow.engine.environment import prepare_environment
from spanflow.engine.protocol import EngineInfo, EngineRequest, Lease
from spanflow.engine.vllm.client import VllmEngine
from spanflow.errors import EngineDied, EngineUnavailable, PromptTooLong, QueryError
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm

#: Room for 3,495 of the 8,192 tokens of the short model's window: 4 layers, 3 heads, 2 * 64 numbers of 4 bytes each.
SMALL = {"kv_cache_gib": 0.02}


@pytest.fixture
def _alone(start_rig: Any) -> Iterator[None]:
    start_rig.stop()
    yield


def asked(num_tokens: int, max_tokens: int = 2, **options: Any) -> EngineRequest:
    ids = tuple(100 + 7 * at % 997 for at in range(num_tokens))
    prompt = SpanPrompt(ids, (Span(4, num_tokens // 2, NO_ANCHOR),))
    return EngineRequest(f"of-{num_tokens}", prompt, Sampling(max_tokens), **options)


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("in_process", [False, True])
async def test_a_window_that_nobody_asked_for_is_what_the_cache_holds(
    short_model_dir: Path, in_process: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Else a model of a long window would not start at all. The longest prompt runs, and what runs when the engine is
    closed ends with an error."""
    with caplog.at_level(logging.WARNING, "spanflow"):
        engine = await VllmEngine.start(str(short_model_dir), in_process=in_process, audit_steps=True, **SMALL)
    try:
        if in_process:
            with pytest.raises(EngineUnavailable, match="an engine runs in this process already"):
                await VllmEngine.start(str(short_model_dir), in_process=True, spans=False, **SMALL)
        window = engine.info.max_model_len
        assert 3300 < window <= 3495
        assert f"the window is {window} tokens, which is what the KV cache holds, and not the 8192" in caplog.text
        assert [piece.finish_reason async for piece in engine.stream(asked(window - 2))][-1] == "length"
        for _ in range(2):  # what is left early leaves its name free
            left: Any = engine.stream(asked(30, 50))
            await anext(left)
            await left.aclose()
        with pytest.raises(PromptTooLong, match=f"the window is {window}.* kv_cache_gib"):
            await anext(aiter(engine.stream(asked(window))))
        # A source of sources as long as the window does not fit beside them: it would be computed as no reader wants.
        plain = [replace(asked(size), prompt=SpanPrompt((7,) * size)) for size in (window - 1, window)]
        kept = [await engine.prefetch(one) for one in (asked(100), asked(window - 1), *plain)]
        assert kept == [True, False, True, False]
        assert (await engine.audit())["problems"] == []
        running = engine.stream(asked(20, window - 30))
        await anext(aiter(running))
        waiting = [asyncio.ensure_future(rest(running))]
        await asyncio.sleep(0.05)
        # Others have only just come, or come while it is being closed.
        waiting += [asyncio.ensure_future(rest(engine.stream(asked(size, 900)))) for size in (40, 41)]
        await asyncio.sleep(0)
        with pytest.raises(QueryError, match="request 'of-40' is still running"):
            await anext(aiter(engine.stream(asked(40))))
    finally:
        await engine.close()
    for request in waiting:
        with pytest.raises(EngineDied):
            await asyncio.wait_for(request, 10)
    for again in (engine.stream(asked(20)), engine.stream(replace(asked(20), request_id="later"))):
        with pytest.raises(EngineDied, match="the engine is closed; open a new session"):
            await anext(aiter(again))
    with pytest.raises(EngineDied, match="the engine is closed"):
        await engine.reset()
    await engine.close()


async def rest(pieces: Any) -> None:
    async for _ in pieces:
        pass


@pytest.mark.usefixtures("_alone")
async def test_a_window_that_does_not_fit_is_refused_with_its_numbers(
    short_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whichever error vLLM ends: that of an engine in its own process names no cause."""
    said = (
        rf"^vLLM did not start on {re.escape(str(short_model_dir))}: 0\.02 GiB of KV cache hold 3456 tokens, where "
        "each layer has full attention, and the window is to be 3500: raise kv_cache_gib, or lower max_model_len "
        r"\(left out, it is what fits\)\. It says: "
    )
    with pytest.raises(EngineUnavailable, match=said):
        await VllmEngine.start(str(short_model_dir), in_process=True, max_model_len=3500, **SMALL)
    from spanflow.engine.vllm import backend

    def die(given: Any) -> Any:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(backend, "_in_its_process", die)
    with pytest.raises(EngineUnavailable, match=said):
        await VllmEngine.start(str(short_model_dir), max_model_len=3500, **SMALL)
    with pytest.raises(EngineUnavailable, match=r"did not start on .*Engine core init.*VLLM_LOGGING_LEVEL=INFO"):
        await VllmEngine.start(str(short_model_dir), max_model_len=3456, **SMALL)


async def test_a_window_of_nothing_is_refused(short_model_dir: Path) -> None:
    for window in (0, -1):
        with pytest.raises(QueryError, match=f"max_model_len is {window}; give at least 1, or leave it out"):
            await VllmEngine.start(str(short_model_dir), max_model_len=window)


@pytest.mark.parametrize(("named", "given"), [(4096, -1), (-1, None)])
def test_a_model_that_names_no_window_gets_vllms_own(
    monkeypatch: pytest.MonkeyPatch, named: int, given: int | None
) -> None:
    """What vLLM takes for -1 where there is no length to cut."""
    prepare_environment()
    from spanflow.engine.vllm import arguments

    class Arguments(SimpleNamespace):
        def create_model_config(self) -> Any:
            return SimpleNamespace(max_model_len=named)

    monkeypatch.setattr(arguments, "AsyncEngineArgs", Arguments)
    assert arguments.with_window({"model": "m", "max_model_len": -1}).max_model_len == given
    assert arguments.with_window({"model": "m", "max_model_len": 300}).max_model_len == 300


async def test_a_window_without_room_for_the_test_of_keys_serves_no_spans() -> None:
    backend: Any = SimpleNamespace(max_model_len=5, kv_itemsize=4, vocabulary=100, has_spans=True)
    engine = VllmEngine(backend, EngineInfo("vllm", "m", 5, 16), {})
    await engine._probe(require_spans=False)
    assert engine.info.spans_unsupported == "its window has no room for a test of rotated keys"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("data_parallel_size", "a session has one engine core"),
        ("data_parallel_rank", "a session has one engine core"),
        ("kv_offloading_size", "spans need a connector of their own"),
        ("max_num_queued_reqs", "say max_concurrency"),
    ],
)
async def test_options_that_go_with_refused_ones_are_refused(short_model_dir: Path, name: str, why: str) -> None:
    with pytest.raises(QueryError, match=f"option '{name}' can't be given: {why}"):
        await VllmEngine.start(str(short_model_dir), **{name: 2})


async def test_stock_vllm_is_asked_for_nothing_that_spans_need() -> None:
    """Neither a lease nor its release: there is nobody who would read them."""
    seen: list[Any] = []

    class Backend:
        has_spans = False

        async def generate(self, request: EngineRequest, extra: Any, lora: Any, *, ignore_eos: bool) -> Any:
            seen.append((request.request_id, extra))
            done = SimpleNamespace(text="", token_ids=[1], finish_reason="length", logprobs=None)
            yield SimpleNamespace(outputs=[done], kv_transfer_params=None, num_cached_tokens=0)

    backend: Any = Backend()
    backend.running = set()
    engine = VllmEngine(backend, EngineInfo("vllm", "m", 512, 16, "started without spans"), {})
    assert [piece.finish_reason async for piece in engine.stream(asked(20, lease=Lease()))] == ["length"]
    await engine.release(("of-20",))
    assert seen == [("of-20", None)]
