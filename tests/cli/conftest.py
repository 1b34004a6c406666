"""The scripted engine, for commands."""

from __future__ import annotations

import pytest
from scripted_engine import Script, register


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    """What the scripted engine of a command does; commands open sessions on it with `--engine scripted`."""
    register(monkeypatch)
    script = Script()
    monkeypatch.setattr("spanflow.cli.settings.engine_options", lambda given: {"script": script})
    return script
