"""Processes that an engine starts, and the program that they are started from."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing import spawn
from typing import Any

#: What a process that lost its parent gets to end by itself.
_SECONDS_TO_END = 10

_lock = threading.Lock()
_inside = 0
_original: Any = None
#: Whether the task or thread that asks is inside; work that it hands to a thread has its context, and is so too.
_is_inside: ContextVar[bool] = ContextVar("spanflow_without_main_module", default=False)


@contextmanager
def without_main_module() -> Iterator[None]:
    """Processes that are spawned inside do not import the caller's main module; those of other tasks and threads do.

    multiprocessing imports it in each child, to unpickle what is defined there. An engine's processes need nothing of
    it, and a script without `if __name__ == "__main__"` would run, and start an engine, again in each of them.
    """
    global _inside, _original
    with _lock:
        if not _inside:
            _original = spawn.get_preparation_data
            spawn.get_preparation_data = _without_main
        _inside += 1
    before = _is_inside.set(True)
    try:
        yield
    finally:
        _is_inside.reset(before)
        with _lock:
            _inside -= 1
            if not _inside:
                spawn.get_preparation_data = _original


def _without_main(name: str) -> Any:
    data = _original(name)
    if not _is_inside.get():
        return data
    return {key: value for key, value in data.items() if not key.startswith("init_main_from_")}


def end_with_parent() -> None:
    """End this process, a child made by multiprocessing, when its parent is gone, however that ended.

    It is asked to end, and killed where it has not done so after some seconds. Does nothing in any other process.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_SECONDS_TO_END)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="spanflow-parent").start()
