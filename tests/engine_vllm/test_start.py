"""Starting: what vLLM is given, the caller's loop goes on meanwhile, and nothing is left where it is given up."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from spanflow import EngineUnavailable, ModelError, Session
from spanflow.engine.environment import prepare_environment
from spanflow.engine.protocol import EngineRequest
from spanflow.engine.vllm.client import VllmEngine
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
    from spanflow.engine.vllm import arguments

    await start(model_dir, **options)
    assert given["kv_cache_memory_bytes"] == on_cpu * 2**30
    given.clear()
    monkeypatch.setattr(arguments, "is_cpu", lambda: False)
    await start(model_dir, gpu_memory_utilization=0.5, **options)
    assert given.get("kv_cache_memory_bytes") == (None if on_gpu is None else on_gpu * 2**30)
    assert given["gpu_memory_utilization"] == 0.5


@pytest.mark.parametrize(("wanted", "given_to_vllm"), [({}, 3), ({"max_loras": 2}, 3), ({"max_loras": 5}, 5)])
async def test_on_a_cpu_no_adapter_stands_in_the_last_place(
    given: dict[str, Any], model_dir: Path, wanted: dict[str, int], given_to_vllm: int
) -> None:
    """vLLM's CPU kernels take what stands there for tokens of no adapter, too: these would come out wrong."""
    await start(model_dir, adapters={"red": "there", "blue": "here"}, **wanted)
    assert given["max_loras"] == given_to_vllm


async def test_the_headers_are_those_of_the_tokenizer_that_vllm_is_given(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, model_dir: Path, tmp_path: Path
) -> None:
    from spanflow.engine.vllm import arguments

    asked: list[tuple[str, dict[str, Any]]] = []

    def get_tokenizer(place: str, **options: Any) -> Any:
        asked.append((place, options))
        return SimpleNamespace(chat_template=None)

    monkeypatch.setattr(arguments, "get_tokenizer", get_tokenizer)
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


class Made:
    """An engine, as far as `start` looks at one."""

    def __init__(self) -> None:
        self.engine_core = self
        self.model_config = SimpleNamespace(max_model_len=512, dtype="float32")
        self.ended_on: list[threading.Thread] = []

    def get_tokenizer(self) -> Any:
        raise ValueError("no tokenizer")

    def shutdown(self) -> None:
        self.ended_on.append(threading.current_thread())


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """The engine that vLLM makes, and the environment that it was made in, as `made.environment`."""
    prepare_environment()
    from spanflow.engine.vllm import backend

    engine = Made()

    def make(arguments: Any) -> Any:
        engine.environment = dict(os.environ)  # type: ignore[attr-defined]
        return engine

    monkeypatch.setattr("spanflow.engine.vllm.arguments.AsyncEngineArgs", SimpleNamespace)
    monkeypatch.setattr(backend, "AsyncLLM", SimpleNamespace(from_engine_args=make))
    monkeypatch.setattr(backend, "_stepped_engine", make)
    return engine


@pytest.mark.parametrize("in_process", [False, True])
async def test_an_engine_that_lacks_what_spans_use_is_ended(
    made: Made, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    from spanflow.engine.vllm import backend

    def check_client(engine: Any) -> None:
        assert engine is made
        raise EngineUnavailable("vLLM lacks what spans use")

    monkeypatch.setattr(backend, "check_client", check_client)
    with pytest.raises(EngineUnavailable, match=r"^vLLM lacks what spans use$"):
        await backend.start({"model": "m"}, in_process=in_process)
    assert len(made.ended_on) == 1
    assert made.ended_on[0] is not threading.current_thread()


@pytest.mark.parametrize("in_process", [False, True])
async def test_an_engine_without_a_tokenizer_is_ended(made: Made, in_process: bool) -> None:
    from spanflow.engine.vllm import backend

    with pytest.raises(ModelError, match="vLLM can't load m: no tokenizer"):
        await backend.start({"model": "m"}, in_process=in_process)
    assert len(made.ended_on) == 1


async def test_damaged_weights_of_a_hub_are_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a directory are looked at before; here vLLM is the first that reads them."""
    prepare_environment()
    from safetensors import SafetensorError

    from spanflow.engine.vllm import backend

    def read(arguments: Any) -> Any:
        raise SafetensorError("header too large")

    monkeypatch.setattr("spanflow.engine.vllm.arguments.AsyncEngineArgs", SimpleNamespace)
    monkeypatch.setattr(backend, "_stepped_engine", read)
    with pytest.raises(ModelError, match=r"^vLLM can't load org/model: header too large$"):
        await backend.start({"model": "org/model"}, in_process=True)


@pytest.mark.parametrize("in_process", [False, True])
async def test_what_keeps_torch_quiet_is_there_for_the_start_alone(
    made: Made, monkeypatch: pytest.MonkeyPatch, in_process: bool
) -> None:
    from spanflow.engine.vllm import backend

    for name in ("PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    with pytest.raises(ModelError):
        await backend.start({"model": "m"}, in_process=in_process)
    added = made.environment.keys() - before.keys()  # type: ignore[attr-defined]
    assert added == {"PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS"}
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("arguments", "free"),
    [
        ({}, None),
        ({"scheduler_cls": "s"}, "1"),
        ({"scheduler_cls": "s", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}, "4"),
    ],
)
async def test_an_engine_with_spans_computes_on_as_many_cores_as_one_without(
    made: Made, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any], free: str | None
) -> None:
    from spanflow.engine.vllm import backend

    monkeypatch.delenv("VLLM_CPU_NUM_OF_RESERVED_CPU", raising=False)
    monkeypatch.setattr("spanflow.engine.environment._num_cores", lambda: 16)
    with pytest.raises(ModelError):
        await backend.start({"model": "m", **arguments}, in_process=False)
    assert made.environment.get("VLLM_CPU_NUM_OF_RESERVED_CPU") == free  # type: ignore[attr-defined]


@pytest.mark.slow
def test_vllm_is_imported_in_silence_and_the_environment_is_as_before() -> None:
    program = """
import os
from spanflow.engine.vllm.client import _import, prepare_environment

prepare_environment()
before = dict(os.environ)
_import()
changed = {name for name, value in os.environ.items() if before.get(name) != value}
print(sorted(name for name in changed if name.startswith(("TORCH_LOGS", "TORCH_CPP", "PYTHON"))))
"""
    quiet = ("PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS")
    environment = {name: value for name, value in os.environ.items() if name not in quiet}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)


def test_starts_in_this_process_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one puts back what another one has set, and the last one leaves it so."""
    prepare_environment()
    from spanflow.engine.vllm import backend

    seen: list[tuple[int, str | None]] = []
    inside: list[None] = []

    class Arguments(SimpleNamespace):
        def create_engine_config(self) -> Any:
            inside.append(None)
            time.sleep(0.05)
            seen.append((len(inside), os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")))
            inside.pop()
            raise ValueError("no model")

    def start() -> None:
        with pytest.raises(ValueError, match="no model"):
            backend._in_process({"model": "m"})

    monkeypatch.setattr("spanflow.engine.vllm.arguments.AsyncEngineArgs", Arguments)
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)
    before = dict(os.environ), list(warnings.filters)
    threads = [threading.Thread(target=start) for _ in range(3)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # so that the second one begins within the first one
    for thread in threads:
        thread.join(10)
    assert seen == [(1, "0")] * 3
    assert (dict(os.environ), list(warnings.filters)) == before


def children() -> set[int]:
    """Processes below this one, but for Python's own book-keeper of shared memory."""
    return {child.pid for child in psutil.Process().children(recursive=True) if is_one(child)}


def is_one(child: psutil.Process) -> bool:
    try:
        command = " ".join(child.cmdline())
        return child.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in command
    except psutil.Error:  # it has just ended
        return False


def test_a_child_that_has_ended_does_not_count() -> None:
    """Also before anybody has waited for it."""
    before = children()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert children() - before == {child.pid}
        child.stdin.write(b"\n")
        child.stdin.close()
        limit = time.monotonic() + 10
        while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < limit
        assert children() == before


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(120):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - it happens outside of this process
            await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_the_loop_goes_on_while_the_engine_starts(
    model_dir: Path, start_rig: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing is said by vLLM, torch or their processes of what is so on every CPU."""
    start_rig.stop()
    capfd.readouterr()
    longest = 0.0

    async def tick() -> None:
        nonlocal longest
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.02)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()

    ticking = asyncio.create_task(tick())
    begun = time.monotonic()
    engine = await VllmEngine.start(str(model_dir), **SMALL)
    took = time.monotonic() - begun
    ticking.cancel()
    request = EngineRequest("one", SpanPrompt(tuple(range(100, 140))), Sampling(3))
    pieces = [piece async for piece in engine.stream(request)]
    await engine.close()
    assert longest < took / 3
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.completion == 3
    out, err = capfd.readouterr()
    assert out == ""
    assert not [word for word in ("Triton", "NUMA", "Loading", "Warning", "Traceback") if word in err]


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
