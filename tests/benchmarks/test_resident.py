"""Whether a KV pool is in memory, as Linux tells it of each mapping."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks import _engines
from benchmarks._resident import anonymous_sizes, resident_pools

_SMAPS = """\
7f0000000000-7f0040000000 rw-p 00000000 00:00 0
Size:            1048576 kB
Rss:                2048 kB
Anonymous:          1024 kB
AnonHugePages:         0 kB
7f1000000000-7f1040000000 r--p 00000000 fe:00 7   /models/model.safetensors
Size:            1048576 kB
Rss:             1048576 kB
Anonymous:             0 kB
"""


def test_what_a_file_backs_is_no_pool() -> None:
    assert list(anonymous_sizes(_SMAPS.splitlines())) == [1 << 20, 0]


@pytest.mark.parametrize(("fill", "expected"), [("b[::4096] = bytes(len(b) // 4096)", 1), ("pass", 0)])
def test_a_pool_that_nobody_wrote_to_is_not_in_memory(fill: str, expected: int) -> None:
    size = 48 << 20
    code = f"import mmap\nb = mmap.mmap(-1, {size}, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n{fill}\n"
    code += "print('ready', flush=True)\ninput()"
    before = resident_pools(size)
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert resident_pools(size) - before == expected
        child.communicate(b"\n")
    assert child.returncode == 0


def test_a_pool_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_engines, "resident_pools", lambda num_bytes: 1)
    with pytest.raises(RuntimeError, match=r"1 of 2 engines hold a KV pool of 0\.5 GiB in memory; free some memory"):
        _engines._check_pools(0.5)
