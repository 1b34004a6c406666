"""A model's tokenizer and window without its engine: enough to say what a query becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from spanflow.engine.models import resolve_model
from spanflow.errors import EngineUnavailable, ModelError
from spanflow.installing import install_advice


def load_tokenizer(
    model: str | Path, *, progress: Callable[[str], None] | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Any, int | None]:
    """The Hugging Face tokenizer of a model, and the length of its window in tokens where its directory says so.

    `options` are an engine's; those of vLLM that say where a tokenizer is, and whether its code is trusted, count here.
    Raises ModelError, and EngineUnavailable where transformers is missing.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EngineUnavailable(f"the tokenizer of {model} needs {error.name}; {install_advice()}") from error
    place = resolve_model(model, progress=progress)
    given = options or {}
    source = str(given.get("tokenizer") or place)
    how = {"revision": given.get("tokenizer_revision") or given.get("revision")}
    how["trust_remote_code"] = given.get("trust_remote_code")
    how = {name: value for name, value in how.items() if value}
    try:
        return AutoTokenizer.from_pretrained(source, **how), _window(Path(place))
    except Exception as error:  # broken files make transformers fail in many ways
        raise ModelError(
            f"the tokenizer of model {str(model)!r} does not load from {source}: {error!r}. Name a directory or a hub "
            "name of a model with a tokenizer, or 'smollm2'."
        ) from error


def _window(place: Path) -> int | None:
    config = place / "config.json"
    if not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    return found if isinstance(found, int) else None
