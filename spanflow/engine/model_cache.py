"""Directories of converted models in the user's cache: built once, whole or not at all, checked when used."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spanflow.engine.embedded import Embedded, convert, sha256_of, source_file
from spanflow.errors import EngineUnavailable, ModelError
from spanflow.installing import install_advice

_MARKER = "spanflow.json"
_HASHED_ALWAYS = 16 << 20  # files up to this size are hashed at every use; larger ones when they look touched
_ELSEWHERE = "set SPANFLOW_CACHE to a directory on another disk"

_log = logging.getLogger(__name__)


def cache_directory() -> Path:
    """Where models are kept: SPANFLOW_CACHE, or `spanflow` in the platform's cache directory of the user."""
    if chosen := os.environ.get("SPANFLOW_CACHE"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "spanflow"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "spanflow"
    return Path.home() / ".cache" / "spanflow"


def ensure_embedded(
    model: Embedded,
    *,
    cache: Path | None = None,
    progress: Callable[[str], None] | None = None,
    verify: bool = False,
) -> Path:
    """The directory of an embedded model, built where it is missing or damaged; one process builds, others wait.

    `verify` hashes the weights too. Raises ModelError where it cannot be written, saying how much is needed
    and how to choose another place, and EngineUnavailable where a package is missing.
    """
    say = progress or _log.info
    target = (cache or cache_directory()).absolute() / "models" / model.directory_name
    if target.is_dir() and not find_damage(target, verify=verify):
        return target
    try:
        from filelock import FileLock
    except ImportError as error:
        raise EngineUnavailable(f"building the embedded model needs {error.name}; {install_advice()}") from error
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(target.name + ".lock")):
            damage = find_damage(target, verify=verify) if target.is_dir() else "absent"
            if damage and damage != "absent":
                warn = progress or _log.warning
                warn(f"the cached model {target} is damaged ({damage}); building it again")
            if damage:
                _build(model, target, say)
    except OSError as error:
        raise _cannot_write(model, target, error) from error
    return target


def find_damage(directory: Path, *, verify: bool = False) -> str:
    """What differs from the marker that was written with the directory, or ''.

    Sizes are compared always, contents of small files too. Large files are hashed where `verify` asks for it
    or where they were touched since they were written.
    """
    try:
        files: dict[str, dict[str, Any]] = json.loads((directory / _MARKER).read_text(encoding="utf-8"))["files"]
        for name, wanted in files.items():
            about = (directory / name).stat()
            if about.st_size != wanted["size"]:
                return f"{name} has {about.st_size} bytes instead of {wanted['size']}"
            untouched = about.st_mtime_ns == wanted["mtime_ns"]
            if (verify or not untouched or about.st_size <= _HASHED_ALWAYS) and sha256_of(directory / name) != wanted[
                "sha256"
            ]:
                return f"{name} has other contents than were written"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{_MARKER} is unreadable"
    return ""


def _build(model: Embedded, target: Path, say: Callable[[str], None]) -> None:
    """Convert into a directory beside the target, then put it in its place. The caller holds the lock."""
    prefix = f".{target.name}.part-"
    for left_over in target.parent.glob(f"{prefix}*"):  # of a process that was killed
        shutil.rmtree(left_over, ignore_errors=True)
    source = source_file(model)
    free = shutil.disk_usage(target.parent).free
    if free < model.num_bytes:
        raise OSError(errno.ENOSPC, f"{free / 1e6:.0f} MB are free")
    say(f"converting the embedded model {model.title} once, into {target} ({model.num_bytes / 1e6:.0f} MB)")
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        try:
            convert(source, part, say)
        except Exception as error:
            # the writer of safetensors wraps the system's error in one of its own
            if shutil.disk_usage(part).free < model.num_bytes // 100 or "os error 28" in str(error):
                raise OSError(errno.ENOSPC, str(error)) from error
            raise
        part.chmod(0o755)  # temporary ones are for their owner only
        for file in part.iterdir():
            file.chmod(0o644)
        _write_marker(model, part)
        if target.exists():
            old = part.with_name(part.name + "-old")
            target.rename(old)
            part.rename(target)
            shutil.rmtree(old, ignore_errors=True)
        else:
            part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    say(f"the embedded model is ready in {target}")


def _write_marker(model: Embedded, directory: Path) -> None:
    files = {
        path.name: {"size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": sha256_of(path)}
        for path in sorted(directory.iterdir())
    }
    about = {"model": model.title, "source_sha256": model.sha256, "content": model.content, "files": files}
    (directory / _MARKER).write_text(json.dumps(about, indent=1), encoding="utf-8")


def _cannot_write(model: Embedded, target: Path, error: OSError) -> ModelError:
    needed = f"{model.num_bytes / 1e6:.0f} MB"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ModelError(
            f"the disk of {target.parent} is full: the embedded model {model.title} needs {needed} there "
            f"({error.strerror}). Free some space, or {_ELSEWHERE}."
        )
    if error.errno is None:  # raised by a library, not by the system
        return ModelError(f"the embedded model {model.title} cannot be converted: {error}")
    return ModelError(
        f"the embedded model {model.title} cannot be written to {target.parent}: {error}. It needs {needed} "
        f"in a directory that may be written to: {_ELSEWHERE}."
    )
