"""Runs of plans on a scripted engine: order, bounds, inner answers, failures, cancellation."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest
from runner.running import (
    TOKENIZER,
    asks,
    candidates,
    events_of,
    host_of,
    judge,
    result_of,
    script,
    script_text,
)
from scripted_engine import Script, ScriptedEngine, until

from spanflow import PromptTooLong, commute, generate, seq, user
from spanflow.compile import compile_query
from spanflow.engine.protocol import EngineRequest, Lease
from spanflow.lowering.template import ChatTemplate
from spanflow.result import Delta, Done, Finished, Started
from spanflow.runner import Host, RunOptions, run_plan


async def test_events_of_one_generation_come_in_order() -> None:
    events = await events_of(generate(user("hello")), script(answer=lambda r: " a b"))
    started, first, second, finished, done = events
    assert (started, first, second) == (Started("$", 0, 9), Delta("$", 0, " a"), Delta("$", 0, " b"))
    assert isinstance(finished, Finished)
    assert isinstance(done, Done)
    assert done.result.text == " a b"
    assert done.result == finished.result
    assert 0 <= done.result.ttft <= done.result.total_seconds <= done.result.elapsed


async def test_inner_answers_stand_as_ids_in_the_outer_prompt_and_are_leased_for_it() -> None:
    seen = script(answer=lambda r: " best" if "which?" in script_text(r) else f" text{len(seen.submitted)}")
    result = await result_of(judge(*candidates(2)), seen)
    assert result.text == " best"
    outer = seen.submitted[-1]
    assert script_text(outer).count("<|im_start|>assistant\n text") == 2
    spans = outer.prompt.spans
    assert [span.is_generated for span in spans] == [True, True]
    for request, span, report in zip(seen.submitted, spans, result.spans, strict=False):
        assert request.lease == Lease(1, 600.0)
        # the span is the end of the inner prompt and the answer; its anchor is the rest of the inner prompt
        shared = span.num_taken or 0
        assert span.anchor.token_ids + outer.prompt.tokens(span)[:shared] == request.prompt.token_ids
        assert (report.kind, report.status, report.anchor) == ("generated", "hit", "prompt")
    assert outer.lease is None
    assert [span.path for span in result.spans] == [
        "$.query.operands[0].operands[0]",
        "$.query.operands[0].operands[1]",
    ]
    assert {path: [r.text for r in results] for path, results in result.inner.items()} == {
        "$.query.operands[0].operands[0]": [" text1"],
        "$.query.operands[0].operands[1]": [" text2"],
    }


async def test_generates_nested_two_levels_deep() -> None:
    seen = script()
    middle = judge(*candidates(2))
    result = await result_of(judge(middle, *candidates(1)), seen)
    assert len(seen.submitted) == 5
    assert set(result.inner) == {
        "$.query.operands[0].operands[0]",
        "$.query.operands[0].operands[0].query.operands[0].operands[0]",
        "$.query.operands[0].operands[0].query.operands[0].operands[1]",
        "$.query.operands[0].operands[1]",
    }
    root, inner = (
        seen.submitted[-1],
        next(r for r in seen.submitted if "operands[0]#0" in r.request_id and r.prompt.spans),
    )
    # the anchor of a candidate that was itself a judge has that judge's spans
    assert root.prompt.spans[0].anchor.spans == inner.prompt.spans
    assert result.total_usage.completion == 5


async def test_n_samples_share_one_lowering_and_have_seeds_of_their_own() -> None:
    seen = script()
    result = await result_of(generate(user("hello"), n=3, temperature=1.0), seen, seed=5)
    assert len({request.prompt for request in seen.submitted}) == 1
    assert len({request.sampling.seed for request in seen.submitted}) == 3
    assert [sample.seed for sample in result.samples] == [request.sampling.seed for request in seen.submitted]
    assert [sample.sample for sample in result.samples] == [0, 1, 2]
    again = script()
    await result_of(generate(user("hello"), n=3, temperature=1.0), again, seed=5)
    assert [r.sampling.seed for r in again.submitted] == [r.sampling.seed for r in seen.submitted]


async def test_samples_of_an_inner_generate_are_candidates_and_are_leased_for_all_readers() -> None:
    seen = script()
    query = generate(seq(commute(*candidates(1, n=2, temperature=1.0)), user("which?")), n=3, temperature=1.0)
    result = await result_of(query, seen)
    assert [request.lease for request in seen.submitted] == [Lease(3, 600.0)] * 2 + [None] * 3
    assert len(seen.submitted[-1].prompt.spans) == 2
    assert len(result.inner["$.query.operands[0].operands[0]"]) == 2


async def test_an_exact_commute_leases_nothing_and_makes_no_spans() -> None:
    seen = script()
    result = await result_of(judge(*candidates(2)), seen, rung="exact")
    assert [request.lease for request in seen.submitted] == [None] * 3
    assert result.spans == ()
    assert seen.released == []


async def test_ids_behind_a_stop_string_are_not_carried_on() -> None:
    seen = script(answer=lambda r: " one two STOP three" if "write" in script_text(r) else " best")
    result = await result_of(judge(*candidates(1, stop=" STOP")), seen)
    (inner,) = result.inner["$.query.operands[0].operands[0]"]
    assert inner.text == " one two"
    assert TOKENIZER.decode(inner.token_ids) == " one two STOP three"
    assert "assistant\n one two<|im_end|>" in script_text(seen.submitted[-1])


async def test_submission_follows_the_order_of_the_plan_within_the_bound() -> None:
    seen = script(seconds=0.002)
    await result_of(judge(*candidates(9)), seen, host_of(seen, 3))
    assert seen.most_running == 3
    assert [request.request_id.partition("/")[2] for request in seen.submitted] == [
        *(f"$.query.operands[0].operands[{i}]#0" for i in range(9)),
        "$#0",
    ]


async def test_two_runs_share_the_bound_and_have_different_names() -> None:
    seen = script(seconds=0.001)
    host = host_of(seen, 2)
    await asyncio.gather(*[result_of(judge(*candidates(3)), seen, host) for _ in range(2)])
    assert seen.most_running == 2
    assert len({request.request_id for request in seen.submitted}) == 8


async def test_max_tokens_is_the_query_s_or_what_the_window_leaves() -> None:
    seen = script(window=40)
    await result_of(generate(user("hello")), seen)
    await result_of(generate(user("hello"), max_tokens=3), seen)
    await result_of(generate(user("hello")), seen, max_tokens=9)
    num_tokens = len(seen.submitted[0].prompt)
    assert [request.sampling.max_tokens for request in seen.submitted] == [40 - num_tokens, 3, 9]


@pytest.mark.parametrize(("max_tokens", "asked"), [(None, 1), (30, 30)])
async def test_a_prompt_beyond_the_window_is_refused_before_anything_is_submitted(
    max_tokens: int | None, asked: int
) -> None:
    seen = script(window=40)
    long = generate(user(" word" * (36 if max_tokens is None else 10)), max_tokens=max_tokens)
    with pytest.raises(PromptTooLong, match=r"^\$\.query\.operands\[0\]\.operands\[2\]: the prompt has") as caught:
        await result_of(judge(*candidates(2), long), seen)
    assert (caught.value.max_tokens, caught.value.max_model_len) == (asked, 40)
    assert seen.submitted == []


async def test_leases_of_one_prompt_are_given_up_by_the_last_run_that_holds_one() -> None:
    seen = script(hangs=asks("which?"))
    host = host_of(seen)
    tasks = [asyncio.create_task(result_of(judge(*candidates(1)), seen, host)) for _ in range(2)]
    await until(lambda: len(seen.submitted) == 4)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    assert seen.released == []
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert len(seen.released) == 2


async def test_nothing_blocks_the_event_loop() -> None:
    gaps: list[float] = []

    async def watch() -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    class SlowTokenizer(type(TOKENIZER)):  # type: ignore[misc]
        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            if "write" in text:
                time.sleep(0.3)
            return super().encode(text, add_special_tokens)  # type: ignore[no-any-return]

    seen = Script(tokenizer=SlowTokenizer())
    host = host_of(seen)
    watcher = asyncio.create_task(watch())
    await result_of(judge(*candidates(2)), seen, host)
    watcher.cancel()
    assert max(gaps) < 0.2


async def test_what_an_engine_does_not_report_is_said_to_be_unreported_or_unsupported() -> None:
    class Silent(ScriptedEngine):
        def _reports(self, request: EngineRequest) -> Any:
            return ()

    for unsupported, status in (("", "unreported"), ("no rotary embedding", "unsupported")):
        seen = script(unsupported=unsupported)
        engine = Silent("m", seen)
        host = Host(engine, ChatTemplate(engine.tokenizer), model="m", max_concurrency=4)
        result = await result_of(generate(user(commute("one text", "two text"), "why?")), seen, host)
        assert [span.status for span in result.spans] == [status] * 2
        assert all(span.computed == (span.end - span.start) * bool(unsupported) for span in result.spans)


async def test_salt_priority_and_adapter_travel_with_the_request() -> None:
    seen = script()
    chosen = RunOptions(salt="tenant", priority=3, lease_seconds=5.0)
    query = judge(*candidates(1), generate(user("write"), model="polite"))
    plan = compile_query(query, chosen, model="m", adapters=["polite"]).plan
    async with aclosing(run_plan(plan, host_of(seen), chosen)) as events:
        assert [event async for event in events]
    assert {(request.salt, request.priority) for request in seen.submitted} == {("tenant", 3)}
    assert [request.adapter for request in seen.submitted] == [None, "polite", None]
    assert seen.submitted[0].lease == Lease(1, 5.0)


@pytest.mark.parametrize(("reader", "own"), [(None, 0), ("m", 0), ("polite", 1)])
async def test_an_answer_of_another_adapter_is_read_as_its_tokens(reader: str | None, own: int) -> None:
    """Its KV is no use to the reader, and no engine lets one adapter take over what another one left. The session's
    model may be named."""
    seen = script(answer=lambda request: f" fine{request.adapter}")
    chosen = RunOptions()
    query = judge(generate(user("write"), model="m"), generate(user("write"), model="polite"), model=reader)
    plan = compile_query(query, chosen, model="m", adapters=["polite"]).plan
    async with aclosing(run_plan(plan, host_of(seen), chosen)) as events:
        *_, last = [event async for event in events]
    *inner, outer = seen.submitted
    assert [request.adapter for request in seen.submitted] == [None, "polite", (None, "polite")[own]]
    assert [request.lease is not None for request in inner] == [own == 0, own == 1]
    assert [f"assistant\n fine{name}<|im_end|>" in script_text(outer) for name in (None, "polite")] == [True, True]
    (span,) = outer.prompt.spans
    answer = TOKENIZER.decode(outer.prompt.tokens(span)[span.num_taken or 0 :])
    assert answer.startswith(f" fine{(None, 'polite')[own]}")
    assert isinstance(last, Done)
    assert [span.path for span in last.result.spans] == [f"$.query.operands[0].operands[{own}]"]
