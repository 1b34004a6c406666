"""The scripted engine, for commands."""

from __future__ import annotations

import os

import pytest
from scripted_engine import Script, register


@pytest.fixture(autouse=True)
def _hub_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands set this for their process, which here is that of the tests."""
    before = os.environ.get("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    if before is None:
        monkeypatch.delenv("HF_HUB_OFFLINE")
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", before)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """What the scripted engine of a command does; commands open sessions on it with `--engine scripted`."""
    register(monkeypatch)
    script = Script()
    monkeypatch.setattr("spanflow.cli.settings.engine_options", lambda given: {"script": script})
    return script
