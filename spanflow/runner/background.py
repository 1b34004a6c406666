"""An event loop on a thread of its own, and work on it that any thread or other loop may wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from spanflow.runner.host import GRACE

T = TypeVar("T")

#: Seconds after which an end that does not come is not waited for any more.
_PATIENCE = 60.0


class Job(Generic[T]):
    """Work on a background loop. Waiting for it can be interrupted; then the work is cancelled, and its end awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._done: Future[T] = Future()
        self._done.set_running_or_notify_cancel()  # it is cancelled by way of its task alone
        try:
            loop.call_soon_threadsafe(self._begin, work)
        except RuntimeError:  # the loop is closed
            work.close()
            raise

    def wait(self) -> T:
        """The result, for a thread that may block."""
        try:
            return self._done.result()
        except BaseException:
            self.end()
            raise

    async def join(self) -> T:
        """The result, for a coroutine on any loop."""
        try:
            return await asyncio.wrap_future(self._done)
        except asyncio.CancelledError:
            await self.aend()
            raise

    def cancel(self) -> None:
        """Cancel the work; may be called from any thread, and when it is over."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nothing runs there any more
            self._loop.call_soon_threadsafe(lambda: self._task and self._task.cancel())

    def end(self) -> None:
        """Cancel the work unless it is over, and wait for its end, whatever that is."""
        if not self._done.done():
            self.cancel()
            if not self._is_here():  # where garbage is collected on the loop itself, its end cannot be waited for
                concurrent.futures.wait([self._done], timeout=GRACE)

    async def aend(self) -> None:
        """Like `end`, for a coroutine on any loop."""
        if not self._done.done():
            self.cancel()
            await asyncio.wait([asyncio.wrap_future(self._done)], timeout=GRACE)

    def _is_here(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._finish)

    def _finish(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._done.set_exception(asyncio.CancelledError())
        elif (error := task.exception()) is not None:
            self._done.set_exception(error)
        else:
            self._done.set_result(task.result())


class Background:
    """A thread that runs an event loop until `stop`. It keeps no program from ending."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, T]) -> Job[T]:
        """Begin work. Raises RuntimeError after `stop`."""
        return Job(self._loop, work)

    def is_here(self) -> bool:
        """Whether the calling thread is the loop's own, where waiting for a job would wait for ever."""
        return threading.current_thread() is self._thread

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `last`, stop the loop and end the thread; what else runs there is cancelled. Idempotent."""
        if self._loop.is_closed():
            return
        if self.is_here():  # a last reference was dropped on the loop itself: it cannot wait for its own end
            self._ending = self._loop.create_task(self._end(last))
            return
        with contextlib.suppress(RuntimeError):
            asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        self._thread.join(_PATIENCE)

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=GRACE)
            if not threading.main_thread().is_alive():
                self._loop.set_default_executor(_Inline())
            await last()
        finally:
            self._loop.stop()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


class _Inline(ThreadPoolExecutor):
    """Runs work where it is submitted: while the interpreter ends, other executors take no work."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run the work now."""
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - it is raised where the future is awaited
            done.set_exception(error)
        return done
