"""How much memory is left: the machine's word, the container's bound, and the smaller of the two."""

from __future__ import annotations

from pathlib import Path

import pytest

from spanflow.engine.memory import available_memory

MEMINFO = "MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable: 40 kB\nSwapFree: 8 kB\nHugePages_Total: 0\n"


def place(folder: Path, meminfo: str | None, **cgroup: str) -> tuple[Path, Path]:
    if meminfo is not None:
        (folder / "meminfo").write_text(meminfo)
    for name, text in cgroup.items():
        (folder / f"memory.{name}").write_text(text)
    return folder / "meminfo", folder


@pytest.mark.parametrize(
    ("meminfo", "cgroup", "wanted"),
    [
        (MEMINFO, {}, 48 * 1024),
        (MEMINFO, {"max": "max\n", "current": "9\n", "stat": "anon 1\n"}, 48 * 1024),
        (MEMINFO, {"max": "9000\n", "current": "5000\n", "stat": "anon 1\ninactive_file 300\n"}, 4300),
        (MEMINFO, {"max": "900000\n", "current": "5000\n", "stat": "anon 1\n"}, 48 * 1024),
        (None, {"max": "9000\n", "current": "5000\n", "stat": "anon 1\n"}, 4000),
        (None, {}, None),
        ("nonsense", {}, None),
    ],
)
def test_the_smaller_bound_counts(
    tmp_path: Path, meminfo: str | None, cgroup: dict[str, str], wanted: int | None
) -> None:
    assert available_memory(*place(tmp_path, meminfo, **cgroup)) == wanted


def test_this_machine_says_something() -> None:
    available = available_memory()
    assert available is None or available > 0
