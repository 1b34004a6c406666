"""Engines by name, imported late, with errors that say what to do."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from spanflow.engine.registry import ENGINES, Factory, start_engine
from spanflow.errors import EngineUnavailable, QueryError


def _fake(monkeypatch: pytest.MonkeyPatch, start: object) -> None:
    module = types.ModuleType("spanflow_fake_engine")
    module.FakeEngine = type("FakeEngine", (), {"start": start})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    factory = Factory(module.__name__, "FakeEngine")
    monkeypatch.setattr("spanflow.engine.registry.ENGINES", {"fake": factory})


async def test_an_unknown_engine_names_the_known_ones() -> None:
    with pytest.raises(EngineUnavailable, match="no engine is called 'tgi'; known engines: oracle, simulator, vllm"):
        await start_engine("tgi", "smollm2")


async def test_options_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(model: str, *, block_size: int = 32) -> object:
        return (model, block_size)

    _fake(monkeypatch, staticmethod(start))
    assert await start_engine("fake", "m", block_size=64) == ("m", 64)


async def test_an_unknown_option_names_the_known_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(model: str, *, block_size: int = 32, progress: object = None) -> object:
        return (model, block_size)

    _fake(monkeypatch, staticmethod(start))
    with pytest.raises(QueryError, match="engine 'fake' has no option 'blocksize'; its options: block_size, progress"):
        await start_engine("fake", "m", blocksize=64)


async def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(model: str) -> object:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    _fake(monkeypatch, staticmethod(start))
    with pytest.raises(EngineUnavailable, match=r"needs the package 'torch'; run python3 \.ci/environment\.py"):
        await start_engine("fake", "m")


async def test_a_package_that_is_missing_on_import_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "spanflow.engine.oracle", raising=False)
    monkeypatch.delitem(sys.modules, "spanflow.engine.oracle_model", raising=False)
    monkeypatch.delitem(sys.modules, "spanflow.engine.oracle_cache", raising=False)
    with pytest.raises(
        EngineUnavailable, match=r"engine 'oracle' does not start here: .*run python3 \.ci/environment\.py"
    ):
        await start_engine("oracle", "smollm2")


async def test_our_own_import_errors_are_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanflow.engine.registry.ENGINES", {"fake": Factory("spanflow.no_such_module", "X")})
    with pytest.raises(ModuleNotFoundError, match=r"spanflow\.no_such_module"):
        await start_engine("fake", "m")


def test_the_engines_of_the_package() -> None:
    assert set(ENGINES) == {"vllm", "oracle", "simulator"}


def test_the_registry_and_the_simulator_load_nothing_heavy() -> None:
    script = (
        "import sys, spanflow.engine.registry, spanflow.engine.models, spanflow.engine.simulator\n"
        "heavy = {'torch', 'transformers', 'vllm', 'tokenizers', 'filelock', 'gguf', 'networkx'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
