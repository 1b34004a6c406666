"""Programs without a main guard may open sessions whose engines start processes."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

import psutil
import pytest

from spanflow.engine.children import without_main_module

PROGRAM = """
import multiprocessing, sys
from operator import index
from spanflow.engine.children import without_main_module

print("runs", flush=True)
if sys.argv[1:] == ["bare"]:
    process = multiprocessing.get_context("spawn").Process(target=index, args=(3,))
    process.start()
else:
    with without_main_module(), without_main_module():
        process = multiprocessing.get_context("spawn").Process(target=index, args=(3,))
        process.start()
process.join()
print("child ended with", process.exitcode)
"""


def test_a_child_does_not_run_the_program_again(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, program, *arguments], capture_output=True, text=True, timeout=30)

    assert run().stdout == "runs\nchild ended with 0\n"
    assert "child ended with 1" in run("bare").stdout  # what is prevented


def test_everything_is_as_before_afterwards() -> None:
    before = spawn.get_preparation_data
    with without_main_module():
        with without_main_module():
            assert spawn.get_preparation_data is not before
        assert spawn.get_preparation_data is not before
        assert not any(key.startswith("init_main") for key in spawn.get_preparation_data("child"))
    assert spawn.get_preparation_data is before


async def test_processes_of_others_are_left_alone_meanwhile() -> None:
    """What a program starts while its session starts an engine on the same loop, or on another thread."""

    def has_main() -> bool:
        return any(key.startswith("init_main") for key in spawn.get_preparation_data("child"))

    assert has_main()
    inside, over = asyncio.Event(), asyncio.Event()

    async def start() -> tuple[bool, bool]:
        with without_main_module():
            inside.set()
            await over.wait()
            return has_main(), await asyncio.to_thread(has_main)

    task = asyncio.create_task(start())
    await inside.wait()
    assert has_main()
    assert await asyncio.to_thread(has_main)
    over.set()
    assert await task == (False, False)


CHILD = """
import multiprocessing, os, signal, sys, time
from spanflow.engine import children

def child(is_deaf):
    if is_deaf:
        children._SECONDS_TO_END = 0.5
        signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
    children.end_with_parent()
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.1)

if __name__ == "__main__":
    children.end_with_parent()
    multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1:] == ["deaf"],)).start()
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["", "deaf"])
@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGKILL])
def test_a_child_ends_with_its_parent(tmp_path: Path, ends: signal.Signals, how: str) -> None:
    """However the parent is ended, and also where the child will not hear of it."""
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    with subprocess.Popen([sys.executable, program, how], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(ends)
        parent.wait(10)
        assert psutil.wait_procs([child], timeout=10)[1] == []
        assert parent.stdout.read() == ("asked\n" if how else "")
