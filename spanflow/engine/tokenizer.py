"""A model's tokenizer and window without its engine: enough to say what a query becomes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spanflow.engine.models import resolve_model
from spanflow.errors import EngineUnavailable, ModelError


def load_tokenizer(model: str | Path, *, progress: Callable[[str], None] | None = None) -> tuple[Any, int | None]:
    """The Hugging Face tokenizer of a model, and the length of its window in tokens where its directory says so.

    Raises ModelError, and EngineUnavailable where transformers is missing.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EngineUnavailable(
            f"the tokenizer of {model} needs {error.name}; run: pip install 'spanflow[cpu]'"
        ) from error
    place = resolve_model(model, progress=progress)
    try:
        return AutoTokenizer.from_pretrained(str(place)), _window(Path(place))
    except Exception as error:  # broken files make transformers fail in many ways
        raise ModelError(
            f"the tokenizer of model {str(model)!r} does not load from {place}: {error!r}. Name a directory or a hub "
            "name of a model with a tokenizer, or 'smollm2'."
        ) from error


def _window(place: Path) -> int | None:
    config = place / "config.json"
    if not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    return found if isinstance(found, int) else None
