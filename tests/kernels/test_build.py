"""How the compiled kernel is found, kept, and not used where it does not fit."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path

import pytest

from spanflow.kernels import build

SOURCE, SYMBOL = "small.cpp", "small_digest"

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build._COMPILERS)), reason="needs a C++ compiler: one of " + ", ".join(build._COMPILERS)
)


@pytest.fixture(autouse=True)
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    core = tmp_path / "core"
    core.mkdir()
    code = 'extern "C" __attribute__((visibility("default"))) const char* small_digest() { return SPANFLOW_DIGEST; }'
    (core / SOURCE).write_text(code)
    monkeypatch.setattr(build, "_CORE", core)
    return core


def fake_compiler(directory: Path, script: str) -> None:
    path = directory / "c++"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@needs_compiler
def test_it_is_built_once_and_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    library = build.build_and_load(SOURCE, SYMBOL, cache)
    assert not isinstance(library, str), library
    (kept,) = cache.iterdir()
    assert kept.suffix == ".so"
    monkeypatch.setenv("PATH", "")
    assert not isinstance(build.build_and_load(SOURCE, SYMBOL, cache), str)

    # Of other sources, under this name: asked for its digest, it does not fit.
    monkeypatch.setattr(build, "_digest", lambda flags: "other")
    kept.rename(cache / "small-other.so")
    assert "none of the C++ compilers" in str(build.build_and_load(SOURCE, SYMBOL, cache))


def test_a_file_that_is_no_library_of_this_machine_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(build, "_digest", lambda flags: "this")
    (tmp_path / "small-this.so").write_bytes(b"not a library")
    assert "none of the C++ compilers" in str(build.build_and_load(SOURCE, SYMBOL, tmp_path))


@needs_compiler
def test_a_damaged_file_is_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_digest", lambda flags: "this")
    (tmp_path / "small-this.so").write_bytes(b"not a library")
    assert not isinstance(build.build_and_load(SOURCE, SYMBOL, tmp_path), str)


@needs_compiler
def test_a_cache_that_can_not_be_written_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert not isinstance(build.build_and_load(SOURCE, SYMBOL, tmp_path / "file" / "cache"), str)


def test_a_compiler_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    fake_compiler(tools, "echo 'warning: old' >&2; echo 'fatal error: no such header' >&2; exit 1")
    why = build.build_and_load(SOURCE, SYMBOL, tmp_path / "cache")
    assert "c++ failed: fatal error: no such header" in str(why)
    assert not list((tmp_path / "cache").iterdir())
    fake_compiler(tools, "exit 0")
    assert "can't be loaded here" in str(build.build_and_load(SOURCE, SYMBOL, tmp_path / "cache"))


def test_every_source_and_flag_counts(small_source: Path) -> None:
    digests = {build._digest(("-O3",)), build._digest(("-O2",))}
    (small_source / "small.h").touch()
    digests.add(build._digest(("-O3",)))
    (small_source / "small.h").write_text("//")
    digests.add(build._digest(("-O3",)))
    assert len(digests) == 4


def test_vectors_are_as_wide_as_the_processor_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    wide = "avx512f avx512bw avx512dq avx512vl"
    for machine, flags, wanted in (
        ("x86_64", f"fpu avx2 f16c {wide}", [f"-m{name}" for name in (*wide.split(), "f16c")]),
        ("x86_64", "fpu avx2 f16c avx512f", ["-mavx2", "-mf16c"]),
        ("x86_64", "fpu sse2", []),
        ("aarch64", f"fpu avx2 f16c {wide}", []),
    ):
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t: none\n")
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert list(build.instruction_flags(cpuinfo)) == wanted
    assert build.instruction_flags(tmp_path / "missing") == ()
