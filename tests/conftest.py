"""Fixtures shared by all tiers."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The default model on disk; converted once into the user's cache directory."""
    pytest.importorskip("transformers", reason="the torch tier needs transformers")
    from spanflow.engine.models import resolve_model

    return Path(resolve_model("smollm2"))
