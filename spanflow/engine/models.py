"""From the name of a model to what an engine loads: a directory, or a hub name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

from spanflow.engine.embedded import EMBEDDED
from spanflow.engine.model_cache import ensure_embedded
from spanflow.errors import EngineUnavailable, ModelError
from spanflow.installing import install_advice

#: The model of a session that names none.
DEFAULT_MODEL = "smollm2"

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")


def known_models() -> tuple[str, ...]:
    """The names that need neither a path nor a hub."""
    return tuple(EMBEDDED)


def resolve_model(
    name: str | Path,
    *,
    progress: Callable[[str], None] | None = None,
    cache: Path | None = None,
    verify: bool = False,
) -> Path | str:
    """What an engine loads for `name`: the directory of an embedded model or of a path, or a hub name as it is.

    An embedded model is built in the `cache` directory on first use (by default that of the user, see
    `model_cache.cache_directory`), `progress` is told about it; `verify` reads its weights again and builds
    it anew where they are damaged. Raises ModelError, and EngineUnavailable where a package is missing.
    """
    if isinstance(name, str) and name in EMBEDDED:
        return ensure_embedded(EMBEDDED[name], cache=cache, progress=progress, verify=verify)
    path = Path(name).expanduser()
    if path.is_dir():
        return _checked(path)
    if path.exists():
        raise ModelError(f"model {str(name)!r} is a file; name the directory that holds it with its config.json")
    if isinstance(name, str) and _HUB_NAME.fullmatch(name):
        return name
    raise ModelError(
        f"model {str(name)!r} is neither a known name nor a directory; known names: {', '.join(known_models())}. "
        "Otherwise name a directory with config.json, weights and tokenizer, or a hub name such as 'org/model'."
    )


def _checked(path: Path) -> Path:
    """The directory itself; raises ModelError where it cannot be a model."""
    missing = [] if (path / "config.json").is_file() else ["config.json"]
    if not any(match.is_file() for pattern in _WEIGHTS for match in path.glob(pattern)):
        missing.append("weights (*.safetensors)")
    if not any((path / file).is_file() for file in _TOKENIZERS):
        missing.append(f"a tokenizer ({' or '.join(_TOKENIZERS[:2])})")
    missing += _missing_shards(path)
    what_to_do = "save the model and its tokenizer there with save_pretrained, or name another directory"
    if missing:
        raise ModelError(f"model directory {path} lacks {', '.join(missing)}; {what_to_do}")
    for weights in sorted(path.glob("*.safetensors")):
        if damage := _damage(weights):
            raise ModelError(f"the weights {weights} are damaged: {damage}; {what_to_do}")
    return path


def _missing_shards(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file() and not any(path.glob("*.safetensors")):
        index = path / "pytorch_model.bin.index.json"
    if not index.is_file():
        return []
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        return [f"a readable {index.name}"]
    return sorted(str(shard) for shard in shards if not (path / str(shard)).is_file())


def _damage(weights: Path) -> str:
    """What is wrong with a file of weights, as far as its header says: how long it must be, and what is where."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise EngineUnavailable(f"reading {weights} needs {error.name}; {install_advice()}") from error
    try:
        with safe_open(weights, framework="numpy"):
            return ""
    except (OSError, SafetensorError) as error:
        return str(error)
