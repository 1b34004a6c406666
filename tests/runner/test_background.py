"""The background loop: waiting from threads and from other loops, interruption, the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
from scripted_engine import until

from spanflow.runner.background import Background


async def nothing() -> None:
    """End at once."""


@pytest.fixture
def background() -> Iterator[Background]:
    background = Background("test-loop")
    yield background
    background.stop(nothing)


def test_work_runs_on_the_thread_of_the_loop(background: Background) -> None:
    async def where() -> str:
        return threading.current_thread().name

    assert background.start(where()).wait() == "test-loop"
    assert not background.is_here()


def test_an_error_is_raised_where_the_work_is_waited_for(background: Background) -> None:
    async def fail() -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        background.start(fail()).wait()


async def test_another_loop_waits_without_blocking(background: Background) -> None:
    async def slow() -> int:
        await asyncio.sleep(0.1)
        return 7

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    assert await background.start(slow()).join() == 7
    ticking.cancel()
    assert ticks > 3


async def test_cancelling_the_wait_cancels_the_work_and_waits_for_its_end(background: Background) -> None:
    steps = []

    async def work() -> None:
        steps.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            steps.append("cleaned")

    waiting = asyncio.create_task(background.start(work()).join())
    await until(lambda: steps)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert steps == ["begun", "cleaned"]


def test_end_cancels_and_waits_whatever_the_end_is(background: Background) -> None:
    steps = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cleaned")

    job = background.start(work())
    time.sleep(0.05)
    job.end()
    job.end()
    assert steps == ["cleaned"]


def test_stop_cancels_what_runs_does_the_last_thing_and_is_idempotent() -> None:
    background = Background("test-loop")
    steps = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            steps.append("cancelled")

    async def last() -> None:
        steps.append("last")

    job = background.start(work())
    time.sleep(0.05)
    background.stop(last)
    background.stop(last)
    assert steps == ["cancelled", "last"]
    with pytest.raises(asyncio.CancelledError):
        job.wait()
    with pytest.raises(RuntimeError, match="closed"):
        background.start(nothing())


def test_stop_on_the_loop_itself_does_not_wait_for_itself() -> None:
    background = Background("test-loop")
    ended = threading.Event()

    async def last() -> None:
        ended.set()

    async def stop() -> None:
        background.stop(last)

    background.start(stop()).wait()
    assert ended.wait(2)


def test_the_end_of_work_is_not_waited_for_on_the_loop_itself(background: Background) -> None:
    async def hang() -> None:
        await asyncio.Event().wait()

    job = background.start(hang())

    async def end() -> float:
        begun = time.monotonic()
        job.end()
        return time.monotonic() - begun

    assert background.start(end()).wait() < 0.5
    with pytest.raises(asyncio.CancelledError):
        job.wait()
