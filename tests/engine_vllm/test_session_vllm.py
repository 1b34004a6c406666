"""Sessions on the real engine in its own process: reuse, taking over, interruption, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm_rig import Answer, Judge

from spanflow import PromptTooLong, QueryError, Session, commute, fragment, generate, retrieve, seq, system, user
from spanflow.doctor import diagnose
from spanflow.engine.protocol import EngineOutput, EngineRequest
from spanflow.explain import Expected
from spanflow.result import Delta, Done, Started

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TEXTS = {
    "varn": "The lighthouse of Varn stands on a black cliff and was lit for the first time in 1871 by Ida Holm. " * 3,
    "osk": "The river Osk freezes in November, and the ferry at Tarrin is replaced by a road of ice until March. " * 3,
    "honey": "Honey never spoils while it is sealed; jars from old tombs have been opened and tasted by diggers. " * 3,
    "clock": "The town clock of Merel has thirteen marks, since its maker was paid by the mark and not by day. " * 3,
}


@pytest.fixture(scope="module")
def vllm_session(model_dir: Path, start_rig: Callable[..., Any]) -> Iterator[Session]:
    start_rig.stop()  # type: ignore[attr-defined]
    # As much KV as in the demos, and an option of vLLM's own, which goes through.
    options = {"cpu_kv_cache_gib": 1.5, "max_num_seqs": 64}
    with Session(str(model_dir), max_model_len=4096, max_tokens=12, **options) as session:
        yield session


@pytest.fixture(autouse=True)
def _nothing_left(vllm_session: Session) -> Iterator[None]:
    yield
    found = vllm_session.on_host(lambda host: host.engine.audit())
    assert found["problems"] == []
    assert (found["pins"], found["leases"], found["held"]) == (0, 0, 0)


def question(*names: str, **options: Any) -> Any:
    documents = commute(*[fragment(TEXTS[name], id=name) for name in names], **options)
    return generate(seq(system("Answer briefly."), user(documents, "Who lit the lighthouse?")), max_tokens=6)


def test_spans_are_new_once_and_then_found_in_any_order(vllm_session: Session) -> None:
    first = vllm_session.run(question("varn", "osk", "honey"))
    second = vllm_session.run(question("honey", "varn", "osk"))
    third = vllm_session.run(question("clock", "honey"))
    assert [span.status for span in first.spans] == ["new"] * 3
    assert [span.status for span in second.spans] == ["hit"] * 3
    assert [span.status for span in third.spans] == ["new", "hit"]
    for result in (first, second, third):
        assert all(span.moved + span.repaired + span.computed == span.end - span.start for span in result.spans)
        assert all(span.repaired == 32 for span in result.spans)
    assert second.usage.internal == 0
    assert second.usage.cached >= sum(span.moved for span in second.spans)


def test_everything_repaired_says_what_full_attention_says(vllm_session: Session) -> None:
    exact = vllm_session.run(question("osk", "clock", "varn", rung="exact"))
    repaired = vllm_session.run(question("osk", "clock", "varn", rung="repair(4000)"))
    again = vllm_session.run(question("osk", "clock", "varn", rung="repair(4000)"))
    assert exact.token_ids == repaired.token_ids == again.token_ids
    assert exact.spans == ()


def test_an_explanation_agrees_with_the_run(vllm_session: Session) -> None:
    vllm_session.on_host(lambda host: host.engine.reset())
    vllm_session.run(question("clock"))
    queries = [question("varn", "clock"), question("clock", "varn"), question("varn", "clock", rung="exact")]
    enum = {"type": "string", "enum": ["1871", "1934"]}
    queries.append(generate(queries[0].query, max_tokens=20, schema=enum, temperature=0.5))
    for query in queries:
        (explained,) = vllm_session.explain(query).generations
        result = vllm_session.run(query)
        assert explained.num_tokens == result.usage.prompt
        assert explained.all_hit is not None
        assert explained.all_hit.moved == sum(span.moved for span in result.spans)
        assert [span.status for span in explained.spans] == [span.status for span in result.spans]
        cached, internal = result.usage.cached, result.usage.internal
        assert explained.expected == Expected(cached, result.usage.prompt - cached, internal)


@contextmanager
def overheard(session: Session) -> Iterator[list[Answer]]:
    """What the engine is asked for meanwhile, and what it answers, with log-probabilities."""
    engine = session.on_host(_engine)
    stream, heard = engine.stream, []

    async def told(request: EngineRequest) -> AsyncIterator[EngineOutput]:
        pieces: list[EngineOutput] = []
        async with aclosing(stream(replace(request, logprobs=10))) as outputs:
            try:
                async for piece in outputs:
                    pieces.append(piece)
                    yield piece
            finally:  # Nobody asks for more than the last piece.
                heard.append(Answer.of(request.prompt, pieces))

    engine.stream = told
    try:
        yield heard
    finally:
        del engine.stream


async def _engine(host: Any) -> Any:
    return host.engine


_OPENING = "<|im_start|>assistant\n"


async def _encode(text: str, host: Any) -> list[int]:
    return list(host.engine.tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("question", [(), (user("Which is best?"),)], ids=["", "question"])
@pytest.mark.parametrize("number", [2, 4])
def test_a_judge_takes_the_kv_of_its_candidates_over(
    vllm_session: Session, judge: Judge, number: int, question: tuple[Any, ...]
) -> None:
    """Behind the system message, and before a question or nothing."""
    candidates = generate(user("Tell me about the sea."), n=number, temperature=1.0, max_tokens=70)
    with overheard(vllm_session) as heard:
        result = vllm_session.run(generate(seq(system("You judge."), commute(candidates), *question), max_tokens=5))
    assert [(span.status, span.kind, span.computed) for span in result.spans] == [("hit", "generated", 1)] * number
    answers = result.inner["$.query.operands[1].operands[0]"]
    assert len({answer.token_ids for answer in answers}) == number
    # all that was sampled but the last token comes from the candidates' own KV
    assert result.usage.cached >= sum(len(answer.token_ids) - 1 for answer in answers)
    outer = heard[-1]
    # What closes a turn comes from there as well: all of it behind an answer that was cut off.
    assert all(one.end == other.start for one, other in pairwise(outer.prompt.spans))
    assert {answer.finish_reason for answer in answers} == {"length"}
    opening, closing = (len(vllm_session.on_host(partial(_encode, text))) for text in (_OPENING, "<|im_end|>\n"))
    assert [span.num_taken for span in outer.prompt.spans] == [opening, *[closing + opening] * (number - 1)]
    judge.check(outer)


def test_candidates_that_end_at_a_stop_string_are_taken_over_up_to_it(vllm_session: Session) -> None:
    candidates = generate(user("Say: one two three four"), n=2, temperature=0.3, stop=["three"], max_tokens=20)
    result = vllm_session.run(generate(seq(commute(candidates), user("Which is longest?")), max_tokens=5))
    answers = result.inner["$.query.operands[0].operands[0]"]
    assert all("three" not in answer.text for answer in answers)
    assert [span.status for span in result.spans] == ["hit"] * 2


def test_judges_two_levels_deep(vllm_session: Session) -> None:
    def judge(*operands: Any) -> Any:
        return generate(seq(commute(*operands), user("Which is best?")), max_tokens=8)

    def draft(text: str) -> Any:
        return generate(user(text), temperature=0.7, max_tokens=12)

    result = vllm_session.run(judge(judge(draft("Name a bird."), draft("Name a fish.")), draft("Name a tree.")))
    assert [span.status for span in result.spans] == ["hit", "hit"]
    assert len(result.inner) == 4


def test_what_was_prefetched_is_found(vllm_session: Session) -> None:
    """In full, the block that it does not fill too: nothing of it is computed when it is asked for."""
    vllm_session.on_host(lambda host: host.engine.reset())
    documents = commute(*[fragment(f"{text} {len(text)}") for text in TEXTS.values()], rung="moved")
    query = generate(seq(system("A head that is new."), user(documents, "Who lit it?")), max_tokens=2)
    assert vllm_session.prefetch(query) == 4
    result = vllm_session.run(query)
    assert [span.status for span in result.spans] == ["hit"] * 4
    # The rest is the head, the question, and no document.
    assert result.usage.prompt - result.usage.cached < 60
    assert result.usage.internal == 0


def found(query: str, k: int) -> list[str]:
    """A retriever."""
    return [f"{text} {query}" for text in TEXTS.values()][:k]


@pytest.mark.parametrize("place", ["below a seq", "below a commute", "inside a message", "of an inner generate"])
def test_what_is_retrieved_anywhere_is_prefetched(vllm_session: Session, place: str) -> None:
    vllm_session.on_host(lambda host: host.engine.reset())
    lamp, number = retrieve(found, "Who lit the lamp?", 2), 2
    match place:
        case "below a seq":
            query = generate(seq(system("Answer."), lamp, user("Who?")), max_tokens=2)
        case "below a commute":
            operands, number = commute(TEXTS["clock"] * 2, lamp, seq("Beside it: ", retrieve(found, "Where?", 1))), 4
            query = generate(seq(system("Answer."), user(operands, "Who?")), max_tokens=2)
        case "inside a message":
            query = generate(user("Read: ", lamp, "Who?"), max_tokens=2)
        case _:
            inner = generate(user(lamp, "Who?"), max_tokens=4)
            query = generate(seq(commute(inner), user("Is it true?")), max_tokens=2)
    assert vllm_session.prefetch(query) == number
    result = vllm_session.run(query)
    spans = [span for one in (result, *(r for results in result.inner.values() for r in results)) for span in one.spans]
    assert [span.status for span in spans if span.kind == "text"] == ["hit"] * number
    assert result.total_usage.internal == 0


def test_documents_are_prefetched_while_candidates_are_written(vllm_session: Session) -> None:
    vllm_session.on_host(lambda host: host.engine.reset())
    documents = commute(*[fragment(f"{text} {len(text)}!") for text in TEXTS.values()], rung="moved")
    drafts = generate(user("Write about the sea."), n=2, temperature=1.0, max_tokens=60)
    result = vllm_session.run(generate(seq(commute(drafts), user(documents, "Which fits?")), max_tokens=2))
    assert [span.status for span in result.spans if span.kind == "text"] == ["hit"] * 4


def test_an_answer_of_a_schema_over_documents(vllm_session: Session) -> None:
    """The grammar guides what is decoded behind spans, new and found; a bad schema fails alone."""
    vllm_session.on_host(lambda host: host.engine.reset())
    kinds = {"name": {"type": "string", "maxLength": 12}, "year": {"enum": [1871, 1934]}, "dry": {"type": "boolean"}}
    schema = {"type": "object", "properties": kinds, "required": list(kinds), "additionalProperties": False}

    def ask(*names: str, schema: Any = schema) -> Any:
        documents = commute(*[fragment(TEXTS[name] + "Facts.", id=name) for name in names])
        prompt = seq(system("Answer in JSON."), user(documents, "When was the lighthouse lit, and by whom?"))
        return vllm_session.run(generate(prompt, max_tokens=80, schema=schema))

    first = ask("varn", "osk")
    assert "hit" not in [span.status for span in first.spans]
    with pytest.raises(QueryError, match=r"vLLM refused"):
        ask("varn", "osk", schema={"type": "object", "properties": {"a": {"type": "no such type"}}})
    again, other = ask("varn", "osk"), ask("osk", "varn")
    for result in (first, again, other):
        answer = json.loads(result.text)
        assert {name: type(value) for name, value in answer.items()} == {"name": str, "year": int, "dry": bool}
        assert len(answer["name"]) <= 12
        assert result.finish_reason == "stop"
    assert [span.status for span in (*again.spans, *other.spans)] == ["hit"] * 4
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_batched_token": 64}, r"no option 'max_num_batched_token'.*\(is 'max_num_batched_tokens'"),
        (
            {"kv_gib": 1},
            r"its options: block_size, kv_cache_gib, cpu_kv_cache_gib, max_model_len, adapters, and vLLM's",
        ),
        ({"scheduler_cls": "x"}, "'scheduler_cls' can't be given: spans need a scheduler"),
        ({"enable_prefix_caching": False}, "spans live in the prefix cache"),
        ({"kv_transfer_config": {}}, "spans need a connector of their own, and vLLM takes one"),
    ],
)
def test_options_of_vllm_are_checked_before_it_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        Session("smollm2", **options).info  # noqa: B018 - starts the engine


def test_each_sample_of_a_judge_takes_the_same_candidates_over(vllm_session: Session) -> None:
    """They are generated once, and kept until the last sample has read them."""
    candidates = generate(user("Tell me about the sea."), n=2, temperature=1.0, max_tokens=40)
    outer = generate(seq(commute(candidates), user("Which is best?")), n=3, temperature=1.0, max_tokens=4, seed=1)
    result = vllm_session.run(outer)
    assert [len(answers) for answers in result.inner.values()] == [2]
    assert [[span.status for span in sample.spans] for sample in result.samples] == [["hit"] * 2] * 3


def test_the_engine_takes_less_than_4_gib(vllm_session: Session) -> None:
    """Its processes' own share of memory after a prompt of the whole window, with the KV cache of the demos; 0.6 GiB
    are for a client's imports."""
    documents = [fragment("word " * 900 + str(n)) for n in range(4)]
    vllm_session.run(generate(user(commute(*documents), "What?"), max_tokens=2))
    children = psutil.Process().children(recursive=True)
    in_gib = sum(child.memory_full_info().pss for child in children) / 2**30
    assert 1 < in_gib < 4 - 0.6, f"{len(children)} processes of the engine take {in_gib:.2f} GiB"


def test_many_queries_at_once_come_back_in_order(vllm_session: Session) -> None:
    queries = [question(*names) for names in (("varn", "osk"), ("honey",), ("clock", "varn"), ("osk", "honey"))]
    together = vllm_session.run_many(queries)
    one_by_one = [vllm_session.run(query) for query in queries]
    assert [result.token_ids for result in together] == [result.token_ids for result in one_by_one]


def test_leaving_a_stream_aborts_and_the_session_goes_on(vllm_session: Session) -> None:
    events = vllm_session.stream(generate(user("Tell me a long story about the sea."), max_tokens=2000))
    assert isinstance(next(events), Started)
    assert isinstance(next(events), Delta)
    begun = time.monotonic()
    events.close()
    assert time.monotonic() - begun < 1
    *_, last = vllm_session.stream(question("honey"))
    assert isinstance(last, Done)


async def test_cancelling_a_judge_aborts_its_candidates(vllm_session: Session) -> None:
    candidates = generate(user("Tell me a long story about the sea."), n=4, temperature=1.0, max_tokens=2000)
    task = asyncio.create_task(vllm_session.arun(generate(seq(commute(candidates), user("Which?")))))
    await asyncio.sleep(2)
    begun = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - begun < 1
    assert (await vllm_session.arun(question("honey"))).text


def test_a_prompt_beyond_the_window_is_refused_with_numbers(vllm_session: Session) -> None:
    with pytest.raises(PromptTooLong, match=r"the window is 4096\."):
        vllm_session.run(user("word " * 5000))


def test_the_doctor_finds_nothing_wrong(vllm_session: Session) -> None:
    diagnosis = diagnose(vllm_session)
    assert diagnosis.is_well, str(diagnosis)
    assert all(check.is_ok for check in diagnosis.checks)
