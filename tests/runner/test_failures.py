"""Failures, time limits and cancellation: what is dropped, tried again, aborted and given up."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest
from runner.running import (
    asks,
    candidates,
    events_of,
    failing,
    host_of,
    judge,
    result_of,
    script,
    script_text,
)
from scripted_engine import SpeakingTokenizer, until

from spanflow import (
    EngineDied,
    GenerationFailed,
    GenerationTimeout,
    Session,
    SpansUnsupported,
    commute,
    generate,
    seq,
    user,
)
from spanflow.compile import compile_query
from spanflow.result import Done, Failed, Started
from spanflow.runner import RunOptions, run_plan


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
    with pytest.raises(GenerationFailed, match=r"^\$: all 2 candidates of the commute at \$\.query\.operands\[0\]"):
        await result_of(judge(*candidates(2)), script(answer=lambda r: ValueError("no")), on_error="skip")


async def test_skip_of_an_answer_that_is_needed_fails_its_reader_which_may_be_skipped_itself() -> None:
    needed = seq(candidates(1)[0], user("go on"))
    with pytest.raises(GenerationFailed, match=r"^\$: it needs the answer of \$\.query\.operands\[0\], which fail"):
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
    with pytest.raises(GenerationTimeout, match=r"^\$\.query\.operands\[0\]\.operands\[0\]: no whole answer within 0"):
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
    await until(lambda: len(seen.submitted) == 3)
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 1
    assert [name.partition("/")[2] for name in seen.aborted] == ["$#0"]
    assert len(seen.released) == 2


@pytest.mark.parametrize("on_error", ["fail", "retry", "skip"])
async def test_a_run_that_requires_spans_fails_where_they_ran_with_full_attention(on_error: str) -> None:
    seen = script(why_exact=lambda request: "the pool is too small" if request.prompt.spans else "")
    host = host_of(seen, require_spans=True)
    message = r"^\$: 3 of 3 spans ran with full attention: the pool is too small\. Give the KV cache more room"
    with pytest.raises(SpansUnsupported, match=message) as caught:
        await result_of(judge(*candidates(3)), seen, host, on_error=on_error)
    assert len(caught.value.partial) == 3
    assert len(seen.submitted) == 4  # it would fail in the same way again
    assert len(seen.released) == 3
    result = await result_of(judge(*candidates(3)), seen, host_of(seen))
    assert [span.status for span in result.spans] == ["unsupported"] * 3
    assert not (await result_of(generate(user("hello")), seen, host)).spans


async def test_a_candidate_whose_spans_ran_with_full_attention_is_dropped_where_that_is_the_policy() -> None:
    seen = script(why_exact=lambda request: "it is" if asks("first")(request) else "")
    inner = generate(user(commute("one", "two"), "first"))
    result = await result_of(judge(inner, *candidates(1)), seen, host_of(seen, require_spans=True), on_error="skip")
    assert [type(failure.error) for failure in result.failures] == [SpansUnsupported]
    assert [span.status for span in result.spans] == ["hit"]


def test_a_session_that_requires_spans_leaves_nothing_of_a_run_that_got_none() -> None:
    query = generate(seq(commute(generate(user("write"), max_tokens=30), user("b " * 40)), user("which?")))
    options: dict[str, Any] = {"tokenizer": SpeakingTokenizer(), "block_size": 16, "num_blocks": 9, "max_tokens": 9}
    with Session("m", engine="simulator", **options) as session:
        assert "unsupported" in [span.status for span in session.run(query).spans]
    with Session("m", engine="simulator", require_spans=True, **options) as session:
        with pytest.raises(SpansUnsupported, match="do not fit into the pool together"):
            session.run(query)
        audit = session.on_host(lambda host: host.engine.audit())
        assert (audit["running"], audit["leases"], audit["blocks_in_use"], audit["problems"]) == (0, 0, 0, [])
