"""How spanflow and what its engines need is installed, said in one place."""

from __future__ import annotations


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
