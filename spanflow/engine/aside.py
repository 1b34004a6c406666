"""What takes long to make, beside the event loop, and without anything left of it where it is given up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import TypeVar

T = TypeVar("T")


async def make_aside(make: Callable[[], T], end: Callable[[T], None]) -> T:
    """What `make` returns, run in a thread with the caller's context. It can't be stopped on its way.

    Cancelled, this waits until it is made and `end` has ended it. It is ended even where this is not waited for, since
    it was cancelled again or the loop is gone.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="spanflow-make")
    made = executor.submit(copy_context().run, make)
    executor.shutdown(wait=False)
    try:
        return await asyncio.wrap_future(made)
    except asyncio.CancelledError:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()

        def discard(made: Future[T]) -> None:
            try:
                if not made.cancelled() and made.exception() is None:
                    end(made.result())
            finally:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(gone.set)

        made.add_done_callback(discard)
        await gone.wait()
        raise
