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
    assert available_memory(*place(tmp_path, meminfo, **cgroup), tmp_path / "none") == wanted


@pytest.mark.parametrize(
    ("membership", "folder", "files", "wanted"),
    [
        ("0::/a/b\n", "a/b", ("max", "current", "inactive_file"), 4300),
        ("0::/a/b\n", "a", ("max", "current", "inactive_file"), 4300),
        ("0::/a/b\n", "c", ("max", "current", "inactive_file"), 48 * 1024),
        ("0::/../b\n", "b", ("max", "current", "inactive_file"), 4300),
        ("5:cpu,memory:/a\n0::/\n", "memory/a", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), 4300),
        ("5:cpu,memory:/a\n0::/\n", "memory", ("limit_in_bytes", "usage_in_bytes", "total_inactive_file"), 4300),
    ],
)
def test_the_bounds_of_the_groups_that_the_process_is_in_count(
    tmp_path: Path, membership: str, folder: str, files: tuple[str, str, str], wanted: int
) -> None:
    bound, used, cached = files
    meminfo, root = place(tmp_path, MEMINFO)
    (root / "membership").write_text(membership)
    (root / folder).mkdir(parents=True, exist_ok=True)
    place(root / folder, None, **{bound: "9000", used: "5000", "stat": f"anon 1\n{cached} 300\n"})
    assert available_memory(meminfo, root, root / "membership") == wanted


def test_no_bound_of_version_1_is_none(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    place(tmp_path / "memory", None, limit_in_bytes="9223372036854771712", usage_in_bytes="5", stat="anon 1\n")
    assert available_memory(tmp_path / "none", tmp_path, tmp_path / "none") is None


def test_this_machine_says_something() -> None:
    available = available_memory()
    assert available is None or available > 0
