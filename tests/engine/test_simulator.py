"""The simulator as an engine: answers, waiting, priorities, leaving early, predictions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from engine.word_tokenizer import WordTokenizer

from spanflow.engine.protocol import EngineOutput, EngineRequest, Lease
from spanflow.engine.registry import start_engine
from spanflow.engine.residency import Residency
from spanflow.engine.simulator import SimulatorEngine
from spanflow.errors import EngineDied, EngineUnavailable, PromptTooLong, QueryError
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import Span, SpanPrompt

HEADER = SpanPrompt((1, 2, 3))
DOC = tuple(range(100, 140))
PROMPT = SpanPrompt((1, 2, 3, *DOC, 4, 5), (Span(3, 43, HEADER, 4),))


async def start(**options: object) -> SimulatorEngine:
    options = {"block_size": 16, "num_blocks": 64, "tokenizer": WordTokenizer(), **options}
    engine = await start_engine("simulator", "smollm2", **options)
    assert isinstance(engine, SimulatorEngine)
    return engine


@pytest.fixture
async def engine() -> AsyncIterator[SimulatorEngine]:
    started = await start()
    yield started
    audit = await started.audit()
    assert audit["problems"] == []
    assert audit["running"] == audit["waiting"] == 0
    await started.close()


def ask(prompt: SpanPrompt = PROMPT, request_id: str = "r", **options: object) -> EngineRequest:
    return EngineRequest(request_id, prompt, Sampling(**{"max_tokens": 12, **options}))  # type: ignore[arg-type]


async def run(engine: SimulatorEngine, request: EngineRequest) -> tuple[str, tuple[int, ...], EngineOutput]:
    pieces = [piece async for piece in engine.stream(request)]
    assert all(piece.finish_reason is None for piece in pieces[:-1])
    return "".join(p.text for p in pieces), tuple(t for p in pieces for t in p.token_ids), pieces[-1]


async def test_an_answer_follows_from_the_prompt(engine: SimulatorEngine) -> None:
    text, token_ids, last = await run(engine, ask())
    assert (text, token_ids) == (await run(engine, ask()))[:2]
    assert 6 <= len(token_ids) <= 12
    assert text == engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert last.finish_reason == ("length" if len(token_ids) == 12 and token_ids[-1] != 0 else "stop")
    assert (await run(engine, ask(SpanPrompt((1, 2, 3)))))[0] != text


async def test_samples_differ_by_seed_or_by_request(engine: SimulatorEngine) -> None:
    first = (await run(engine, ask(temperature=1.0, seed=1)))[0]
    assert (await run(engine, ask(request_id="other", temperature=1.0, seed=1)))[0] == first
    assert (await run(engine, ask(temperature=1.0, seed=2)))[0] != first
    unseeded = [(await run(engine, ask(request_id=name, temperature=1.0)))[0] for name in "ab"]
    assert unseeded[0] != unseeded[1]


async def test_scripted_answers_stop_strings_and_lengths() -> None:
    engine = await start(script=lambda request: "one two three four")
    text, token_ids, last = await run(engine, ask())
    assert (text, last.finish_reason) == ("one two three four", "stop")
    assert token_ids == (*engine.tokenizer.encode("one two three four"), engine.tokenizer.eos_token_id)
    text, token_ids, last = await run(engine, ask(stop=(" three",)))
    assert (text, len(token_ids), last.finish_reason) == ("one two", 3, "stop")
    text, token_ids, last = await run(engine, ask(max_tokens=2))
    assert (text, len(token_ids), last.finish_reason) == ("one two", 2, "length")
    assert (await run(engine, ask(schema="{}")))[0] == "one two three four"


async def test_reports_and_usage_add_up(engine: SimulatorEngine) -> None:
    _, token_ids, last = await run(engine, ask())
    assert last.usage is not None
    assert (last.usage.prompt, last.usage.completion, last.usage.cached, last.usage.internal) == (
        45, len(token_ids), 39, 3 + 43,
    )  # fmt: skip
    assert [(r.status, r.moved, r.repaired, r.computed) for r in last.spans] == [("new", 36, 4, 0)]
    _, more, last = await run(engine, ask(SpanPrompt((9, *PROMPT.token_ids), (Span(4, 44, HEADER, 4),))))
    assert last.spans[0].status == "hit"
    assert last.usage is not None
    assert (last.usage.prompt, last.usage.completion, last.usage.internal) == (46, len(more), 0)


async def test_a_document_that_was_prefetched_is_found_whole(engine: SimulatorEngine) -> None:
    assert await engine.prefetch(ask(SpanPrompt((*HEADER.token_ids, *DOC))))
    assert not await engine.prefetch(ask(SpanPrompt((5,) * engine.info.max_model_len)))
    assert (await run(engine, ask()))[2].spans[0].status == "hit"


async def test_a_prediction_comes_true_and_changes_nothing(engine: SimulatorEngine) -> None:
    for _ in range(2):
        foreseen = await engine.predict(ask())
        assert foreseen == await engine.predict(ask())
        _, _, last = await run(engine, ask())
        assert last.usage is not None
        assert (foreseen.spans, foreseen.cached, foreseen.internal) == (
            last.spans,
            last.usage.cached,
            last.usage.internal,
        )
        assert foreseen.computed == last.usage.prompt - foreseen.cached
    with pytest.raises(PromptTooLong):
        await engine.predict(ask(max_tokens=5000))


async def test_requests_wait_for_blocks_in_order_of_priority() -> None:
    engine = await start(num_blocks=4, seconds_per_token=0.002)
    order: list[str] = []

    async def one(name: str, priority: int) -> None:
        await run(engine, replace(ask(SpanPrompt(tuple(range(40))), name, max_tokens=20), priority=priority))
        order.append(name)

    async with asyncio.TaskGroup() as group:
        for name, priority in (("first", 5), ("late", 9), ("early", 1), ("late too", 9)):
            group.create_task(one(name, priority))
            await asyncio.sleep(0.005)
    assert order == ["first", "early", "late", "late too"]
    assert (await engine.audit())["problems"] == []


async def test_leaving_early_gives_everything_back(engine: SimulatorEngine) -> None:
    stream = engine.stream(ask())
    async for _ in stream:
        break
    assert (await engine.audit())["running"] == 1
    await stream.aclose()  # type: ignore[attr-defined]
    audit = await engine.audit()
    assert (audit["running"], audit["blocks_in_use"]) == (0, 0)


async def test_cancelling_one_that_waits(engine: SimulatorEngine) -> None:
    big = SpanPrompt(tuple(range(1000)))
    stream = engine.stream(ask(big, "big", max_tokens=20))
    await anext(aiter(stream))
    task = asyncio.create_task(run(engine, ask(big, "waits", max_tokens=20)))
    await asyncio.sleep(0.02)
    assert (await engine.audit())["waiting"] == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await engine.audit())["waiting"] == 0
    await stream.aclose()  # type: ignore[attr-defined]


async def test_leases_end_with_their_consumer_or_release(engine: SimulatorEngine) -> None:
    inner = replace(ask(request_id="inner"), lease=Lease())
    _, answer, _ = await run(engine, inner)
    assert (await engine.audit())["leases"] == 1
    outer = SpanPrompt((1, 2, 3, *answer, 4, 5), (Span(3, 3 + len(answer), PROMPT, 0, 0),))
    _, _, last = await run(engine, ask(outer, "outer"))
    assert (last.spans[0].status, last.spans[0].moved, last.spans[0].computed) == ("hit", len(answer) - 1, 1)
    assert (await engine.audit())["leases"] == 0
    await run(engine, inner)
    await engine.release(("inner", "unknown"))
    audit = await engine.audit()
    assert (audit["leases"], audit["blocks_in_use"]) == (0, 0)


async def test_reset_forgets(engine: SimulatorEngine) -> None:
    await run(engine, ask())
    await engine.reset()
    assert (await run(engine, ask()))[2].spans[0].status == "evicted"


async def test_faults_are_raised_for_the_request_they_are_made_for() -> None:
    def fault(request: EngineRequest) -> Exception | None:
        return EngineDied("out of memory") if request.request_id == "bad" else None

    engine = await start(fault=fault)
    with pytest.raises(EngineDied, match="out of memory"):
        await run(engine, ask(request_id="bad"))
    assert (await run(engine, ask()))[2].finish_reason is not None


async def test_closing_ends_what_runs_and_waits() -> None:
    engine = await start(seconds_per_token=0.01)
    big = SpanPrompt(tuple(range(1000)))
    tasks = [asyncio.create_task(run(engine, ask(big, name, max_tokens=20))) for name in "ab"]
    await asyncio.sleep(0.03)
    await engine.close()
    await engine.close()
    for task in tasks:
        with pytest.raises(EngineDied, match="the simulator is closed"):
            await task
    audit = await engine.audit()
    assert (audit["running"], audit["waiting"], audit["problems"]) == (0, 0, [])


async def test_requests_that_cannot_be_served_are_refused(engine: SimulatorEngine) -> None:
    with pytest.raises(QueryError, match="the simulator has no probabilities; use engine 'oracle' or 'vllm'"):
        await run(engine, replace(ask(), logprobs=1))
    with pytest.raises(QueryError, match="the simulator follows no schema; script its answers"):
        await run(engine, ask(schema="{}"))
    with pytest.raises(PromptTooLong, match="the window is 1024"):
        await run(engine, ask(max_tokens=1000))
    with pytest.raises(QueryError, match="block_size 0, num_blocks 64, max_model_len 8192: each is at least 1"):
        await start(block_size=0)
    stream = engine.stream(ask())
    await anext(aiter(stream))
    with pytest.raises(QueryError, match="request 'r' is still running"):
        await run(engine, ask())
    await stream.aclose()  # type: ignore[attr-defined]


async def test_without_transformers_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    engine = await start(tokenizer=None)
    with pytest.raises(EngineUnavailable, match=r"run python3 \.ci/environment\.py .*, or start the simulator with"):
        await run(engine, ask())


@pytest.mark.torch
async def test_the_default_tokenizer(model_dir: object) -> None:
    engine = await start(tokenizer=None)
    text, token_ids, _ = await run(engine, ask(max_tokens=8))
    assert text == engine.tokenizer.decode(list(token_ids), skip_special_tokens=True)
    assert len(text.split()) >= 3


async def test_sources_are_made_of_sources_deeper_than_python_calls() -> None:
    """Answers to prompts that took answers over; and where the pool is full in the middle, nothing is left of it."""
    prompt, depth = SpanPrompt(tuple(range(10, 20))), 600
    for number in range(depth):
        tokens = tuple(range(30 + number, 50 + number))
        prompt = SpanPrompt(tokens, (Span(2, 9, SpanPrompt(prompt.token_ids[:-2], prompt.spans), 0, 2),))
    request = EngineRequest("deep", prompt, Sampling(max_tokens=1))
    large, small = (Residency(num_blocks, 16, 2000, lambda: 0.0) for num_blocks in (3 * depth, depth))
    made, refused = (cache.admit_alone(request, 1) for cache in (large, small))
    large.finish(made)
    small.finish(refused)
    assert made.internal > 10 * depth
    assert "do not fit into the pool" in refused.spans[0].why
    assert large.problems() == small.problems() == []
    assert small.pool.num_free == depth
