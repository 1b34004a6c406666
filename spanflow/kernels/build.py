"""The C++ kernels as a shared library: compiled on first use into the cache directory it is given.

Not carried prebuilt by the wheel: that would take a wheel for each platform and C library, built in images that hold
an old one, where one wheel serves all platforms now. Not compiled when spanflow is installed either: an editable
install has no library that falls behind its source, a compiler that comes later is used, and one that is missing
breaks no installation. Without a compiler torch moves KV, with the same results, at 4 to 7% of the kernel's rate
(benchmarks/rerope_rate.py, two cores of a Xeon), and the log names what is missing; whoever runs PyTorch's own
compiler on a CPU has one.

What a library was built from (sources, flags, platform) is in its name and asked of it once it is loaded, so a stale
one, or one of another machine that shares the directory, is not used. The flags name the vectors that this processor
has: each kind of processor builds its own.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_log = logging.getLogger("spanflow")

_CORE = Path(__file__).with_name("core")
_COMPILERS = ("c++", "g++", "clang++")
# Products and sums are rounded one by one, as in the reference: equal results on every CPU. Without regard for traps,
# which nobody reads, conversions need no branches.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-trapping-math")
# The second where a compiler has no OpenMP, or its runtime can't be loaded.
_THREADS = (("-fopenmp",), ("-pthread",))
_COMPILE_SECONDS = 120
# What a kernel has vectors for, widest first: what Linux calls it, and how compilers do. Others get the least that
# all processors of their kind have.
_INSTRUCTIONS = (
    (("avx512f", "avx512bw", "avx512dq", "avx512vl", "f16c"), "x86_64"),
    (("avx2", "f16c"), "x86_64"),
)


def build_and_load(source: str, symbol: str, cache: Path) -> ctypes.CDLL | str:
    """The library of `core/<source>`, or a sentence that says why there is none.

    `symbol` names its function that returns the digest it was built from. Where `cache` can't be written,
    the library is built for this process alone.
    """
    why = ""
    for threads in _THREADS:
        flags = (*_FLAGS, *threads, *instruction_flags())
        digest = _digest(flags)
        path = cache / f"{Path(source).stem}-{digest}.so"
        library = _load(path, symbol, digest)
        if library is not None:
            return library
        compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
        if compiler is None:
            return f"none of the C++ compilers {', '.join(_COMPILERS)} is installed"
        command = [compiler, *flags, f'-DSPANFLOW_DIGEST="{digest}"', str(_CORE / source)]
        try:
            built = _build(command, path, symbol, digest)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{compiler} did not run: {error}"
        if not isinstance(built, str):
            return built
        why = built
    return why


def instruction_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> tuple[str, ...]:
    """How to compile for the instructions of this processor."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ()
    has = set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), ()))
    for names, machine in _INSTRUCTIONS:
        if platform.machine() == machine and has.issuperset(names):
            return tuple(f"-m{name}" for name in names)
    return ()


def _digest(flags: tuple[str, ...]) -> str:
    """What a library depends on: all sources, how they are compiled, and for which platform."""
    digest = hashlib.blake2b(digest_size=10)
    for part in (*flags, sys.platform, platform.machine(), *platform.libc_ver()):
        digest.update(part.encode() + b"\0")
    for path in sorted(_CORE.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _load(path: Path, symbol: str, digest: str) -> ctypes.CDLL | None:
    """The library in `path`, where it can be loaded here and was built from `digest`."""
    if not path.is_file():
        return None
    try:
        library = ctypes.CDLL(str(path))
        ask = getattr(library, symbol)
    except (OSError, AttributeError):
        return None
    ask.restype = ctypes.c_char_p
    return library if ask() == digest.encode() else None


def _build(command: list[str], path: Path, symbol: str, digest: str) -> ctypes.CDLL | str:
    """Compile beside `path`, load it, and only then move it there whole; several processes may do so at once."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        directory = tempfile.mkdtemp(prefix=".build-", dir=path.parent)
    except OSError:
        directory = tempfile.mkdtemp(prefix="spanflow-")
    try:
        new = Path(directory) / path.name
        done = subprocess.run(
            [*command, "-o", str(new)], capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            return f"{command[0]} failed: {next((line for line in lines if 'error' in line), lines[0])}"
        library = _load(new, symbol, digest)
        if library is None:
            return f"what {command[0]} built can't be loaded here"
        # Loaded, it needs no name any more: where it can't be kept it serves this process.
        try:
            new.replace(path)
        except OSError as error:
            _log.info("the compiled kernel is not kept in %s: %s", path.parent, error)
        return library
    finally:
        shutil.rmtree(directory, ignore_errors=True)
