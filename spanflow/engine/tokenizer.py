"""A model's tokenizer and window without its engine: enough to say what a query becomes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanflow.engine.models import resolve_model
from spanflow.errors import EngineUnavailable, ModelError
from spanflow.installing import install_advice

#: Engine arguments of vLLM that say how a tokenizer is loaded, besides where it is.
_OPTIONS = ("tokenizer_mode", "trust_remote_code", "download_dir")
#: The modes of vLLM in which a tokenizer is the one of transformers.
_HF_MODES = ("auto", "hf", "cohere", "kimi_k3", "inkling")


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Where a tokenizer is, and how vLLM loads it: `options` as its engine arguments name them."""

    place: str
    revision: str | None
    options: Mapping[str, Any]


def tokenizer_source(model: str | Path, options: Mapping[str, Any]) -> TokenizerSource:
    """The tokenizer that goes with a model under engine arguments of vLLM; the model's own where they name none."""
    place = str(options.get("tokenizer") or model)
    revision = options.get("tokenizer_revision") or options.get("revision")
    return TokenizerSource(place, revision, {n: options[n] for n in _OPTIONS if options.get(n) is not None})


def load_hf_tokenizer(
    model: str | Path, *, progress: Callable[[str], None] | None = None, options: Mapping[str, Any] | None = None
) -> tuple[Any, int | None]:
    """The Hugging Face tokenizer of a model, and the length of its window in tokens where its directory says so.

    `options` are an engine's; those of vLLM that say where a tokenizer is, and how it is loaded, count here.
    Raises ModelError, and EngineUnavailable where transformers is missing, or where vLLM has a tokenizer of its own.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EngineUnavailable(f"the tokenizer of {model} needs {error.name}; {install_advice()}") from error
    place = resolve_model(model, progress=progress)
    source = tokenizer_source(place, options or {})
    how = _of_transformers(source)
    try:
        return AutoTokenizer.from_pretrained(source.place, **how), _window(Path(place))
    except Exception as error:  # broken files make transformers fail in many ways
        raise ModelError(
            f"the tokenizer of model {str(model)!r} does not load from {source.place}: {error!r}. Name a directory or "
            "a hub name of a model with a tokenizer, or 'smollm2'."
        ) from error


def _of_transformers(source: TokenizerSource) -> dict[str, Any]:
    """What transformers calls a source's options."""
    given = dict(source.options)
    mode = given.pop("tokenizer_mode", "auto")
    if mode not in _HF_MODES:
        raise EngineUnavailable(
            f"tokenizer_mode {mode!r}: that tokenizer is vLLM's own, and transformers does not have it; known without "
            f"the engine: {', '.join(_HF_MODES)}. Start the engine first (enter the session)"
        )
    if "download_dir" in given:
        given["cache_dir"] = given.pop("download_dir")
    return given | ({"revision": source.revision} if source.revision else {})


def _window(place: Path) -> int | None:
    config = place / "config.json"
    if not config.is_file():
        return None
    found = json.loads(config.read_text(encoding="utf-8")).get("max_position_embeddings")
    return found if isinstance(found, int) else None
