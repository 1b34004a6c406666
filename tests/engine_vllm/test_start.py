"""Starting: what vLLM is given, the caller's loop goes on meanwhile, and nothing is left where it is given up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from spanflow import EngineUnavailable, ModelError, Session
from spanflow.engine.protocol import EngineRequest
from spanflow.engine.vllm.client import VllmEngine, prepare_environment
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import SpanPrompt

pytestmark = pytest.mark.vllm

SMALL = {"kv_cache_gib": 0.1, "max_model_len": 512}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The engine arguments that vLLM would be started with; it is not."""
    prepare_environment()
    from spanflow.engine.vllm import backend

    seen: dict[str, Any] = {}

    async def start(arguments: dict[str, Any], *, in_process: bool) -> Any:
        seen.update(arguments)
        raise EngineUnavailable("not started")

    monkeypatch.setattr(backend, "start", start)
    return seen


async def start(model: Path, **options: Any) -> None:
    with pytest.raises(EngineUnavailable, match="not started"):
        await VllmEngine.start(str(model), **options)


@pytest.mark.parametrize(
    ("options", "on_cpu", "on_gpu"),
    [
        ({}, 1.0, None),
        ({"cpu_kv_cache_gib": 2.0}, 2.0, None),
        ({"kv_cache_gib": 0.5}, 0.5, 0.5),
        ({"kv_cache_gib": 0.5, "cpu_kv_cache_gib": 2.0}, 0.5, 0.5),
    ],
)
async def test_the_cache_takes_what_was_said_and_on_a_gpu_what_vllm_leaves_for_it(
    given: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    model_dir: Path,
    options: dict[str, float],
    on_cpu: float,
    on_gpu: float | None,
) -> None:
    from spanflow.engine.vllm import backend

    await start(model_dir, **options)
    assert given["kv_cache_memory_bytes"] == on_cpu * 2**30
    given.clear()
    monkeypatch.setattr(backend, "is_cpu", lambda: False)
    await start(model_dir, gpu_memory_utilization=0.5, **options)
    assert given.get("kv_cache_memory_bytes") == (None if on_gpu is None else on_gpu * 2**30)
    assert given["gpu_memory_utilization"] == 0.5


async def test_the_headers_are_those_of_the_tokenizer_that_vllm_is_given(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path
) -> None:
    from spanflow.engine.vllm import backend

    asked: list[tuple[str, dict[str, Any]]] = []

    def get_tokenizer(place: str, **options: Any) -> Any:
        asked.append((place, options))
        return SimpleNamespace(chat_template=None)

    monkeypatch.setattr(backend, "get_tokenizer", get_tokenizer)
    await start(model_dir)
    await start(model_dir, tokenizer="some/other", trust_remote_code=True, tokenizer_mode="slow", revision="r1")
    await start(model_dir, tokenizer_revision="r2", revision="r1", download_dir="there")
    assert asked == [
        (str(model_dir), {"revision": None}),
        ("some/other", {"revision": "r1", "trust_remote_code": True, "tokenizer_mode": "slow"}),
        (str(model_dir), {"revision": "r2", "download_dir": "there"}),
    ]


async def test_the_headers_of_a_real_tokenizer(given: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    await start(model_dir)
    headers = given["kv_transfer_config"].kv_connector_extra_config["headers"]
    assert headers
    assert all(header and all(type(token) is int for token in header) for header in headers)
    given.clear()
    nowhere = tmp_path / "none"
    with pytest.raises(ModelError, match=f"the tokenizer of {model_dir} can't be loaded from {nowhere}"):
        await VllmEngine.start(str(model_dir), tokenizer=str(nowhere))


def children() -> set[int]:
    """Processes below this one, but for Python's own book-keeper of shared memory."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if "resource_tracker" not in " ".join(child.cmdline())}


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - it happens outside of this process
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_loop_goes_on_while_the_engine_starts(
    model_dir: Path, start_rig: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    start_rig.stop()
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.02)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    ticking = asyncio.create_task(tick())
    engine = await VllmEngine.start(str(model_dir), **SMALL)
    ticking.cancel()
    request = EngineRequest("one", SpanPrompt(tuple(range(100, 140))), Sampling(3))
    pieces = [piece async for piece in engine.stream(request)]
    await engine.close()
    assert longest < 2
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion == 3
    assert capsys.readouterr().out == ""


@pytest.mark.slow
async def test_a_start_that_is_cancelled_leaves_no_process(model_dir: Path, start_rig: Any) -> None:
    start_rig.stop()
    before = children()
    task = asyncio.create_task(VllmEngine.start(str(model_dir), **SMALL))
    await until(lambda: children() - before)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() <= before


@pytest.mark.slow
def test_a_session_closed_while_it_starts_leaves_no_process(model_dir: Path, start_rig: Any) -> None:
    start_rig.stop()
    before = children()
    session = Session(str(model_dir), **SMALL)
    failed: list[BaseException] = []

    def enter() -> None:
        try:
            session.__enter__()
        except BaseException as error:  # noqa: BLE001 - which one is looked at below
            failed.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    asyncio.run(until(lambda: children() - before))
    session.close()
    assert children() <= before
    thread.join(10)
    assert len(failed) == 1
