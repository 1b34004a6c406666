"""Runs of plans on a scripted engine: order, bounds, inner answers, failures, cancellation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import pytest
from scripted_engine import Script, ScriptedEngine

from spanflow import EngineDied, GenerationFailed, GenerationTimeout, PromptTooLong, commute, generate, seq, user
from spanflow.compile import as_generate, compile_query
from spanflow.engine.protocol import EngineRequest, Lease
from spanflow.ir.nodes import Generate, Node
from spanflow.lowering.template import ChatTemplate
from spanflow.result import Delta, Done, Event, Failed, Finished, Result, Started
from spanflow.runner import Host, RunOptions, run_plan


def host_of(script: Script, max_concurrency: int = 64) -> Host:
    engine = ScriptedEngine("m", script)
    return Host(engine, ChatTemplate(engine.tokenizer), model="m", max_concurrency=max_concurrency)


async def events_of(query: Node, script: Script, host: Host | None = None, **options: Any) -> list[Event]:
    chosen = RunOptions().changed(options)
    plan = compile_query(as_generate(query), chosen, model="m").plan
    async with aclosing(run_plan(plan, host or host_of(script), chosen)) as events:
        return [event async for event in events]


async def result_of(query: Node, script: Script, host: Host | None = None, **options: Any) -> Result:
    *_, last = await events_of(query, script, host, **options)
    assert isinstance(last, Done)
    return last.result


def candidates(number: int, **options: Any) -> list[Generate]:
    return [generate(user(f"write {i}"), **options) for i in range(number)]


def judge(*operands: Node, **options: Any) -> Generate:
    return generate(seq(commute(*operands), user("which?")), **options)


def asks(text: str) -> Callable[[EngineRequest], bool]:
    """Whether a request's prompt, without what it takes over from inner answers, contains a text."""
    return lambda request: text in script_text(request)


def script_text(request: EngineRequest) -> str:
    return TOKENIZER.decode(request.prompt.token_ids)


TOKENIZER = Script().tokenizer


def script(**options: Any) -> Script:
    return Script(tokenizer=TOKENIZER, **options)


def failing(text: str, error: Exception | None = None, times: int = 1000) -> Callable[[EngineRequest], str | Exception]:
    left = [times]

    def answer(request: EngineRequest) -> str | Exception:
        if script_text(request).endswith(f"user\n{text}<|im_end|>\n<|im_start|>assistant\n") and left[0]:
            left[0] -= 1
            return error or RuntimeError(f"no {text}")
        return " fine"

    return answer


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


async def test_fail_ends_the_run_aborts_the_others_and_keeps_what_was_done() -> None:
    seen = script(answer=failing("write 1"), hangs=asks("write 2"))
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="no write 1") as caught:
        await result_of(judge(*candidates(3)), seen, host_of(seen))
    assert time.monotonic() - begun < 1
    assert [name.partition("/")[2] for name in seen.aborted] == ["$.query.operands[0].operands[2]#0"]
    partial: Any = caught.value.partial  # type: ignore[attr-defined]
    assert {path: [r.text for r in results] for path, results in partial.items()} == {
        "$.query.operands[0].operands[0]": [" fine"]
    }
    assert len(seen.released) == 3  # of all that had a lease


async def test_skip_drops_the_candidate_from_its_commute() -> None:
    seen = script(answer=failing("write 1"))
    result = await result_of(judge(*candidates(3)), seen, on_error="skip")
    assert len(seen.submitted[-1].prompt.spans) == 2
    assert list(result.inner) == ["$.query.operands[0].operands[0]", "$.query.operands[0].operands[2]"]
    (failure,) = result.failures
    assert (failure.path, failure.sample, str(failure.error)) == (
        "$.query.operands[0].operands[1]",
        0,
        "no write 1",
    )


async def test_skip_drops_the_whole_operand_that_a_generate_stands_in() -> None:
    seen = script(answer=failing("write 0"))
    one, two = candidates(2)
    result = await result_of(judge(seq(user("the first:"), one), seq(user("the second:"), two)), seen, on_error="skip")
    said = script_text(seen.submitted[-1])
    assert "the second:" in said
    assert "the first:" not in said
    assert len(result.failures) == 1


async def test_skip_drops_a_sample_and_keeps_its_siblings() -> None:
    seen = script(answer=failing("write 0", times=1))
    result = await result_of(judge(*candidates(1, n=3, temperature=1.0)), seen, on_error="skip")
    assert len(result.inner["$.query.operands[0].operands[0]"]) == 2
    assert [failure.sample for failure in result.failures] == [0]
    samples = await result_of(
        generate(user("write 0"), n=2), script(answer=failing("write 0", times=1)), on_error="skip"
    )
    assert [sample.sample for sample in samples.samples] == [1]


async def test_skip_with_no_candidate_left_says_so() -> None:
    with pytest.raises(
        GenerationFailed, match=r"^\$: all 2 candidates of the commute at \$\.query\.operands\[0\] fail"
    ):
        await result_of(judge(*candidates(2)), script(answer=lambda r: ValueError("no")), on_error="skip")


async def test_skip_of_an_answer_that_is_needed_fails_its_reader_which_may_be_skipped_itself() -> None:
    needed = seq(candidates(1)[0], user("go on"))
    with pytest.raises(
        GenerationFailed, match=r"^\$: it needs the answer of \$\.query\.operands\[0\], which failed: no w"
    ):
        await result_of(generate(needed), script(answer=failing("write 0")), on_error="skip")
    seen = script(answer=failing("write 0"))
    result = await result_of(judge(generate(needed), *candidates(2)[1:]), seen, on_error="skip")
    assert [failure.path for failure in result.failures] == [
        "$.query.operands[0].operands[0].query.operands[0]",
        "$.query.operands[0].operands[0]",
    ]
    assert len(seen.submitted[-1].prompt.spans) == 1


async def test_retry_tries_again_under_another_name_and_then_goes_on() -> None:
    seen = script(answer=failing("write 0", times=2))
    events = await events_of(judge(*candidates(1)), seen, on_error="retry")
    failed = [event for event in events if isinstance(event, Failed)]
    assert [event.is_retried for event in failed] == [True, True]
    assert len({request.request_id for request in seen.submitted}) == 4
    assert isinstance(events[-1], Done)


async def test_retry_gives_up_after_the_number_of_retries_and_at_once_where_it_cannot_help() -> None:
    seen = script(answer=failing("write 0"))
    with pytest.raises(RuntimeError, match="no write 0"):
        await result_of(judge(*candidates(1)), seen, on_error="retry", num_retries=1)
    assert len(seen.submitted) == 2
    seen = script(answer=failing("write 0", EngineDied("gone")))
    with pytest.raises(EngineDied, match="gone"):
        await result_of(judge(*candidates(1)), seen, on_error="retry")
    assert len(seen.submitted) == 1


async def test_an_engine_that_died_ends_the_run_under_every_policy() -> None:
    with pytest.raises(EngineDied, match="gone"):
        await result_of(judge(*candidates(2)), script(answer=failing("write 0", EngineDied("gone"))), on_error="skip")


async def test_a_generation_that_takes_too_long_is_aborted_and_named() -> None:
    seen = script(hangs=asks("write 0"))
    with pytest.raises(
        GenerationTimeout, match=r"^\$\.query\.operands\[0\]\.operands\[0\]: no whole answer within 0.05 s"
    ):
        await result_of(judge(*candidates(1)), seen, timeout=0.05)
    assert len(seen.aborted) == 1
    result = await result_of(judge(*candidates(2)), script(hangs=asks("write 0")), timeout=0.05, on_error="skip")
    assert isinstance(result.failures[0].error, TimeoutError)


@pytest.mark.parametrize(("finish", "what"), [("abort", "aborted"), ("error", "failed on")])
async def test_an_answer_that_the_engine_gives_up_is_a_failure(finish: Any, what: str) -> None:
    with pytest.raises(GenerationFailed, match=rf"^\$: the engine {what} the request after 1 tokens"):
        await result_of(generate(user("hello")), script(finish=finish))


async def test_leaving_the_events_early_aborts_what_runs_within_a_second() -> None:
    seen = script(hangs=lambda r: True)
    chosen = RunOptions()
    plan = compile_query(judge(*candidates(3)), chosen, model="m").plan
    begun = time.monotonic()
    async with aclosing(run_plan(plan, host_of(seen), chosen)) as events:
        async for event in events:
            if isinstance(event, Started) and event.path.endswith("[2]"):
                break
    assert time.monotonic() - begun < 1
    assert len(seen.aborted) == len(seen.released) == 3
    assert seen.running == set()


async def test_cancelling_the_reader_aborts_what_runs_within_a_second() -> None:
    seen = script(hangs=asks("which?"))
    task = asyncio.create_task(result_of(judge(*candidates(2)), seen))
    while len(seen.submitted) < 3:
        await asyncio.sleep(0.01)
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 1
    assert [name.partition("/")[2] for name in seen.aborted] == ["$#0"]
    assert len(seen.released) == 2


async def test_leases_of_one_prompt_are_given_up_by_the_last_run_that_holds_one() -> None:
    seen = script(hangs=asks("which?"))
    host = host_of(seen)
    tasks = [asyncio.create_task(result_of(judge(*candidates(1)), seen, host)) for _ in range(2)]
    while len(seen.submitted) < 4:
        await asyncio.sleep(0.01)
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
