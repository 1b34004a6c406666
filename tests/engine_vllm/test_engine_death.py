"""The engine's process dies: whoever waits is told, and nothing of it is left."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from spanflow import EngineDied, Session, generate, user

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_killed_engine_is_said_and_swept_up(model_dir: Path, start_rig: Callable[..., Any]) -> None:
    start_rig.stop()  # type: ignore[attr-defined]
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with Session(str(model_dir), max_model_len=2048) as session:
        assert session.run(generate(user("Name a colour."), max_tokens=2)).text
        ours = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        largest = max(ours, key=lambda child: child.memory_info().rss)

        def kill() -> None:
            time.sleep(1)
            largest.kill()

        thread = threading.Thread(target=kill)
        thread.start()
        with pytest.raises(EngineDied):
            session.run(generate(user("Tell me a very long story."), max_tokens=1900))
        thread.join()
        begun = time.monotonic()
        with pytest.raises(EngineDied):
            session.run("And now?")
        assert time.monotonic() - begun < 5
    _, alive = psutil.wait_procs(ours, timeout=10)
    assert [child for child in alive if child.memory_info().rss > 2**26] == []


PROGRAM = """
import sys, time
from spanflow import Session

with Session(sys.argv[1], max_model_len=2048) as session:
    print("up", flush=True)
    session.run("Tell me a very long story.", max_tokens=1900)
"""


def test_no_engine_is_left_of_a_killed_program(model_dir: Path, start_rig: Callable[..., Any]) -> None:
    start_rig.stop()  # type: ignore[attr-defined]
    command = [sys.executable, "-c", PROGRAM, str(model_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "up\n"
        ours = psutil.Process(program.pid).children(recursive=True)
        assert sum(child.memory_info().rss > 2**28 for child in ours) > 0
        program.terminate()
        program.wait(10)
        assert psutil.wait_procs(ours, timeout=20)[1] == []
