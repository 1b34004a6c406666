"""The session's asynchronous methods, from any loop."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest
from scripted_engine import Script, register, until

from spanflow import Session, commute, generate, retrieve, seq, user
from spanflow.result import Done, Started


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def session(script: Script | None = None, **options: Any) -> Session:
    return Session("m", engine="scripted", script=script or Script(), **options)


def hanging() -> Script:
    return Script(hangs=lambda request: True)


def judge(number: int = 3) -> Any:
    return generate(seq(commute(*[generate(user(f"write {i}")) for i in range(number)]), user("which?")))


async def test_the_asynchronous_twins_work_on_any_loop_without_blocking_it() -> None:
    script = Script(seconds=0.02)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.005)
            ticks += 1

    ticking = asyncio.create_task(tick())
    async with session(script) as s:
        one, two = await asyncio.gather(s.arun("hello"), s.arun(judge()))
        assert [one.text, two.text] == [" fine"] * 2
        events = [event async for event in s.astream("hello")]
        assert isinstance(events[-1], Done)
        assert [result.text for result in await s.arun_many(["hello", "again"])] == [" fine"] * 2
        assert "hello" in str(await s.aexplain("hello"))
        other_loop = await asyncio.to_thread(asyncio.run, s.arun("hello"))
        assert other_loop.text == " fine"
        assert s.run("hello").text == " fine"  # the synchronous one inside a running loop
    ticking.cancel()
    assert ticks > 5
    assert (script.num_starts, script.num_closes) == (1, 1)


async def test_asynchronous_retrievers_run_on_the_calling_loop() -> None:
    loops = []

    async def find(query: str) -> list[str]:
        loops.append(asyncio.get_running_loop())
        return ["found"]

    async with session() as s:
        await s.arun(user(retrieve(find, "the sky"), "why?"))
    assert loops == [asyncio.get_running_loop()]


async def test_cancelling_arun_or_leaving_astream_aborts_within_a_second() -> None:
    script = hanging()
    async with session(script) as s:
        task = asyncio.create_task(s.arun(judge()))
        await until(lambda: len(script.submitted) == 3)
        begun = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(script.aborted) == 3
        async with aclosing(s.astream("hello")) as events:
            async for event in events:
                assert isinstance(event, Started)
                break
        assert len(script.aborted) == 4
        assert time.monotonic() - begun < 1
