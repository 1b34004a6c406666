"""What takes long to make, beside the event loop, and without anything left of it where it is given up."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

from spanflow.engine.children import without_main_module

T = TypeVar("T")

_log = logging.getLogger("spanflow")


async def make_aside(make: Callable[[], T], end: Callable[[T], None]) -> T:
    """What `make` returns, run in a thread with the caller's context. It can't be stopped on its way.

    Processes that it starts do not import the caller's main module, however late they are started. Cancelled, this
    waits until it is made and `end`, in a thread too, has ended it. It is ended even where this is not waited for,
    since it was cancelled again or the loop is gone. An error of `end` is logged.
    """

    def make_here() -> T:
        with without_main_module():  # on this thread: the caller may have left when a process is started
            return make()

    def discard() -> None:
        wait([made])
        if not made.cancelled() and made.exception() is None:
            end(made.result())

    executor = ThreadPoolExecutor(1, thread_name_prefix="spanflow-make")
    made = executor.submit(copy_context().run, make_here)
    executor.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        await end_aside(discard)
        raise


async def end_aside(end: Callable[[], None]) -> None:
    """Run `end` in a thread and wait for it; cancelled, the thread goes on. An error is logged, with its reason."""
    loop, gone = asyncio.get_running_loop(), asyncio.Event()

    def end_here() -> None:
        try:
            end()
        except Exception as error:  # noqa: BLE001 - of another package; nobody is left to raise it to
            _log.exception("what was given up could not be ended, and may still run: %r", error)
        finally:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(gone.set)

    threading.Thread(target=end_here, name="spanflow-end").start()  # no daemon: a program does not end before it
    await gone.wait()
