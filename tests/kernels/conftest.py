"""Kernels that are compiled once a session."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from spanflow.kernels import build


@pytest.fixture(scope="session")
def compiler() -> str:
    found = next(filter(None, map(shutil.which, build._COMPILERS)), None)
    if found is None:
        pytest.skip(f"needs a C++ compiler: one of {', '.join(build._COMPILERS)}")
    return found


@pytest.fixture(scope="session")
def kernel_cache(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which kernels are compiled and kept."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def gpu_on_cpu(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The device kernel's source, compiled for the host."""
    from gpu_on_cpu import compile_for_host

    return compile_for_host(compiler, tmp_path_factory.mktemp("gpu_on_cpu"))
