"""How much memory there is left here, by the kernel's word and by the container's bound."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_FILES = ("memory.max", "memory.current", "inactive_file")
_FILES_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
#: From here on a bound of version 1 is its word for none.
_NO_BOUND = 1 << 62
GIB = 1 << 30


def available_memory(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP, membership: Path = _MEMBERSHIP) -> int | None:
    """Bytes that this process may still take; None where nothing says.

    The machine's word counts swap; the bounds are those of the process's control groups (version 2 or 1, and of each
    group above its own that is mounted at `cgroup`).
    """
    bounds = [_of_machine(meminfo)]
    bounds += [_of_group(folder, *_FILES) for folder in _groups(cgroup, membership, "")]
    bounds += [_of_group(folder, *_FILES_V1) for folder in _groups(cgroup / "memory", membership, "memory")]
    return min((found for found in bounds if found is not None), default=None)


def _groups(root: Path, membership: Path, controller: str) -> list[Path]:
    """The root, and the folders below it down to the process's own; controller '' is version 2."""
    try:
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
    except OSError:
        return [root]
    names = [path for _, controllers, path in lines if controller in controllers.split(",")]
    parts = [part for part in names[0].split("/") if part not in ("", "..")] if names else []
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = [line.split() for line in meminfo.read_text().splitlines()]
        sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
        return sizes["MemAvailable"] + sizes.get("SwapFree", 0)
    except (OSError, ValueError, LookupError):
        return None


def _of_group(folder: Path, bound_file: str, used_file: str, cached: str) -> int | None:
    try:
        bound = int((folder / bound_file).read_text())  # 'max' where there is none
        used = int((folder / used_file).read_text())
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return bound - used + int(counts.get(cached, 0)) if bound < _NO_BOUND else None  # cached files give way
    except (OSError, ValueError):
        return None
