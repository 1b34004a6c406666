"""On how many cores an engine computes, by the threads that are bound to one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks._cores import bound_cores, descendants
from benchmarks._engines import cores_note


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads are bound to cores on Linux alone")
def test_cores_are_those_that_threads_are_bound_to() -> None:
    usable = sorted(os.sched_getaffinity(0))
    code = (
        "import os, threading\n"
        f"def bind(core):\n    os.sched_setaffinity(0, {{core}})\n    ready.wait()\n    threading.Event().wait()\n"
        f"ready = threading.Barrier({len(usable) + 2})\n"
        f"for core in {[*usable, usable[0]]}:\n    threading.Thread(target=bind, args=(core,), daemon=True).start()\n"
        "ready.wait()\nprint('ready', flush=True)\ninput()"
    )
    before = descendants()
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert descendants() - before == {child.pid}
        assert bound_cores({child.pid}) == len(usable)
        child.communicate(b"\n")
    assert bound_cores({child.pid}) == 0


def test_a_difference_is_said() -> None:
    assert cores_note(2, 2) == "stock computes on 2 cores, ours on 2"
    assert cores_note(1, 2).startswith("stock computes on 1 core, ours on 2, as vLLM decides by itself; give both all")
    assert "not known" in cores_note(0, 2)
