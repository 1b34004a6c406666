"""Whether an engine's KV pool is in memory before the clock starts.

A page that was never written is mapped at its first use, which would count as somebody's time to first token.
vLLM 0.32 writes zeros to the pool when it allocates it; this looks whether that is so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

_PROC = Path("/proc")


def resident_pools(num_bytes: int) -> int:
    """How many processes started from this one have a private mapping of which at least `num_bytes` are in memory."""
    children = psutil.Process().children(recursive=True)
    return sum(any(size >= num_bytes for size in _sizes(_PROC / str(child.pid) / "smaps")) for child in children)


def _sizes(path: Path) -> Iterator[int]:
    try:
        with path.open() as lines:
            yield from anonymous_sizes(lines)
    except OSError:  # it has ended, or is somebody else's
        return


def anonymous_sizes(smaps: Iterable[str]) -> Iterator[int]:
    """For each mapping, the bytes in memory that no file stands behind (proc_pid_smaps(5), field Anonymous)."""
    for line in smaps:
        if line.startswith("Anonymous:"):
            yield int(line.split()[1]) * 1024
