"""Programs without a main guard may open sessions whose engines start processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from multiprocessing import spawn
from pathlib import Path

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
