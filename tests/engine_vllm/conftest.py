"""One engine alive at a time: a module asks for its configuration, the engine of the last one is stopped first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]

_LAYERS = 4
_WHOLE_RUN = 2000


def pytest_collection_finish(session: pytest.Session) -> None:
    """In a whole run, what a module can prepare in a process of its own it prepares beside the tests before it."""
    if len(session.items) > _WHOLE_RUN and not session.config.option.collectonly and find_spec("vllm") is not None:
        for module in {item.module for item in session.items if isinstance(item, pytest.Function)}:
            if (begin := getattr(module, "begin_early", None)) is not None:
                begin()


@pytest.fixture(scope="session")
def start_rig(model_dir: Path) -> Iterator[Start]:
    """Starts an engine with given options, or hands out the running one if it has them."""
    from vllm_rig import Rig

    running: dict[str, Any] = {}

    def start(model: Path = model_dir, **options: Any) -> Any:
        key = repr((model, sorted(options.items())))
        if key not in running:
            stop()
            running[key] = Rig(model, options)
        return running[key]

    def stop() -> None:
        while running:
            running.popitem()[1].close()

    start.stop = stop  # type: ignore[attr-defined]
    yield start
    stop()


@pytest.fixture(scope="session")
def short_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model without most of its layers: what is left of it is real, and seven times as fast."""
    from transformers import AutoModelForCausalLM

    place = tmp_path_factory.mktemp("short-model")
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    del model.model.layers[_LAYERS:]
    model.config.num_hidden_layers = _LAYERS
    model.save_pretrained(place)
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors" and not (place / file.name).exists():
            shutil.copy(file, place)
    return place


@pytest.fixture(scope="session")
def short_judge(short_model_dir: Path) -> Any:
    """The oracle on the short model."""
    from vllm_rig import Judge

    return Judge(short_model_dir)


@pytest.fixture(scope="session")
def judge(model_dir: Path) -> Any:
    """The oracle on the same model."""
    from vllm_rig import Judge

    return Judge(model_dir)


@pytest.fixture(autouse=True)
def integrity(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test on an engine: references recounted, nothing left over."""
    yield
    if "rig" in request.fixturenames:
        request.getfixturevalue("rig").assert_idle()
