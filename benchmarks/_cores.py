"""On how many cores an engine computes, as Linux tells it of the engine's threads."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil

_PROC = Path("/proc")


def descendants() -> frozenset[int]:
    """The processes that were started from this one, at any depth."""
    return frozenset(child.pid for child in psutil.Process().children(recursive=True))


def bound_cores(processes: Collection[int]) -> int:
    """How many cores have a thread that may run there alone, among the threads of these processes.

    vLLM's worker on a CPU binds each thread that computes to a core. 0 where none is bound.
    """
    return len({core for process in processes for core in _bound(process)})


def _bound(process: int) -> Iterator[int]:
    try:
        threads = [int(path.name) for path in (_PROC / str(process) / "task").iterdir()]
    except OSError:  # it has ended, or is somebody else's, or this is no Linux
        return
    for thread in threads:
        try:
            cores = os.sched_getaffinity(thread)
        except OSError:
            continue
        if len(cores) == 1:
            yield from cores
