"""How much memory there is left here, by the kernel's word and by the container's bound."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
GIB = 1 << 30


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that a process may still take, swap included; None where nothing says."""
    bounds = [found for found in (_of_machine(meminfo), _of_container(cgroup)) if found is not None]
    return min(bounds, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return sizes["MemAvailable"] + sizes.get("SwapFree", 0)
    except (OSError, ValueError, LookupError):
        return None


def _of_container(cgroup: Path) -> int | None:
    try:
        bound = int((cgroup / "memory.max").read_text())  # 'max' where there is none
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return bound - used + int(counts.get("inactive_file", 0))  # cached files give way
    except (OSError, ValueError):
        return None
