"""Starting an engine for a session: what an impatient caller leaves behind."""

from __future__ import annotations

import asyncio
import threading
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import pytest

from spanflow import ModelError, Session
from spanflow.engine import registry
from spanflow.engine.aside import make_aside
from spanflow.runner.startup import EngineChoice


class Slow:
    """An engine that starts its process late: when the test says so."""

    begun, go, over = threading.Event(), threading.Event(), threading.Event()
    main_modules: list[str]

    @classmethod
    async def start(cls, model: str, **options: Any) -> Any:
        return await make_aside(cls.make, lambda made: None)

    @classmethod
    def make(cls) -> None:
        cls.begun.set()
        assert cls.go.wait(10)
        data = spawn.get_preparation_data("child")  # what multiprocessing hands to a process that it spawns
        cls.main_modules = [key for key in data if key.startswith("init_main")]
        cls.over.set()


async def test_a_start_that_is_cancelled_twice_does_not_run_the_program_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a second Ctrl-C: nobody waits for the engine any more, and it has yet to start its process."""
    monkeypatch.setattr(registry, "ENGINES", {"slow": registry.Factory(__name__, "Slow")})
    before = spawn.get_preparation_data
    choice = EngineChoice("slow", "model", require_spans=False, max_concurrency=1, options={}, say=lambda _: None)
    task = asyncio.create_task(choice.start())
    assert await asyncio.to_thread(Slow.begun.wait, 10)
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0.01)
    assert task.cancelled()
    Slow.go.set()
    assert await asyncio.to_thread(Slow.over.wait, 10)
    assert Slow.main_modules == []
    for thread in threading.enumerate():
        if thread.name.startswith(("spanflow-make", "spanflow-end")):
            await asyncio.to_thread(thread.join, 10)
    assert spawn.get_preparation_data is before


def test_a_session_keeps_the_options_that_it_was_given() -> None:
    adapters, overrides = {"a": "where/a"}, {"rope": [1]}
    session = Session(adapters=adapters, hf_overrides=overrides)
    adapters["b"] = "where/b"
    overrides["rope"].append(2)
    assert session.engine_options == {"adapters": {"a": "where/a"}, "hf_overrides": {"rope": [1]}}
    session.close()


@pytest.mark.parametrize("engine", ["vllm", pytest.param("oracle", marks=pytest.mark.torch)])
def test_damaged_weights_are_named_before_an_engine_starts(tmp_path: Path, engine: str) -> None:
    pytest.importorskip("safetensors", reason="weights are read by safetensors")
    psutil = pytest.importorskip("psutil", reason="processes are listed by psutil")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ModelError, match=f"the weights {tmp_path}/model.safetensors are damaged: .*header too small"):
        Session(str(tmp_path), engine=engine).__enter__()
    assert psutil.Process().children(recursive=True) == before
