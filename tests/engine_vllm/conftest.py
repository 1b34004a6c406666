"""One engine alive at a time: a module asks for its configuration, the engine of the last one is stopped first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., Any]


@pytest.fixture(scope="session")
def start_rig(model_dir: Path) -> Iterator[Start]:
    """Starts an engine with given options, or hands out the running one if it has them."""
    from vllm_rig import Rig

    running: dict[str, Any] = {}

    def start(**options: Any) -> Any:
        key = repr(sorted(options.items()))
        if key not in running:
            stop()
            running[key] = Rig(model_dir, options)
        return running[key]

    def stop() -> None:
        while running:
            running.popitem()[1].close()

    start.stop = stop  # type: ignore[attr-defined]
    yield start
    stop()


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
