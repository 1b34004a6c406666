"""Making something in a thread: the loop goes on, and what is given up is ended there too, also without the loop."""

from __future__ import annotations

import asyncio
import threading
import time
from contextvars import ContextVar

import pytest

from spanflow.engine.aside import make_aside

CONTEXT: ContextVar[str] = ContextVar("context", default="")


class Making:
    """Something that is made when the test says so."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.go, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.error = error

    def make(self) -> str:
        self.begun.set()
        assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        return "made" + CONTEXT.get()

    def end(self, made: str) -> None:
        assert made == "made"
        self.ended.set()


async def started(making: Making) -> asyncio.Task[str]:
    task = asyncio.create_task(make_aside(making.make, making.end))
    assert await asyncio.to_thread(making.begun.wait, 10)
    return task


async def test_the_loop_goes_on_meanwhile() -> None:
    making = Making()
    CONTEXT.set(" here")
    task = await started(making)
    begun = time.monotonic()
    for _ in range(5):
        await asyncio.sleep(0.001)
    assert time.monotonic() - begun < 5
    assert not task.done()
    making.go.set()
    assert await task == "made here"
    assert not making.ended.is_set()


async def test_an_error_is_raised_as_it_is() -> None:
    making = Making(KeyError("why"))
    making.go.set()
    with pytest.raises(KeyError, match="why"):
        await make_aside(making.make, making.end)


async def test_cancelled_it_ends_what_it_made_first() -> None:
    making = Making()
    task = await started(making)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    making.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert making.ended.is_set()


async def test_cancelled_where_it_could_not_be_made_there_is_nothing_to_end() -> None:
    making = Making(KeyError("why"))
    task = await started(making)
    task.cancel()
    making.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not making.ended.is_set()


@pytest.mark.parametrize("is_done", [False, True])
def test_it_is_ended_without_the_loop(is_done: bool, caplog: pytest.LogCaptureFixture) -> None:
    making = Making()

    async def twice_cancelled() -> None:
        task = await started(making)
        if is_done:
            making.go.set()
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(twice_cancelled())
    making.go.set()
    assert making.ended.wait(10)
    for thread in threading.enumerate():
        if thread.name.startswith(("spanflow-make", "spanflow-end")):
            thread.join(10)
    assert not caplog.records


async def test_it_is_ended_beside_the_loop_also_where_it_is_made_already() -> None:
    """The cancel comes between the end of the making and the turn of the loop that would have handed it on."""
    begun, go, may_end, ended = (threading.Event() for _ in range(4))
    made_by: list[threading.Thread] = []

    def make() -> str:
        made_by.append(threading.current_thread())
        begun.set()
        assert go.wait(10)
        return "made"

    def end(made: str) -> None:
        assert may_end.wait(2), "the loop, which would let it end, stands still"
        ended.set()

    task = asyncio.create_task(make_aside(make, end))
    assert await asyncio.to_thread(begun.wait, 10)
    go.set()
    made_by[0].join(10)  # without a turn of the loop
    task.cancel()
    asyncio.get_running_loop().call_later(0.02, may_end.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_cannot_be_ended_is_logged_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    making = Making()

    def end(made: str) -> None:
        raise KeyError("no such process")

    making.end = end  # type: ignore[method-assign]
    task = await started(making)
    task.cancel()
    making.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("spanflow", "ERROR", "what was given up could not be ended, and may still run: KeyError('no such process')")
    ]
