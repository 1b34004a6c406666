"""The session: from any thread and any loop, started once, closed once, interrupted in time."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import Script, SpeakingTokenizer, register

from spanflow import (
    EngineDied,
    EngineUnavailable,
    ModelError,
    PromptTooLong,
    QueryError,
    Session,
    SpansUnsupported,
    commute,
    fragment,
    generate,
    retrieve,
    seq,
    system,
    user,
)
from spanflow.result import Delta, Done, Started


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def session(script: Script | None = None, **options: Any) -> Session:
    return Session("m", engine="scripted", script=script or Script(), **options)


def hanging() -> Script:
    return Script(hangs=lambda request: True)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it did not come about within five seconds"
        time.sleep(0.005)


def judge(number: int = 3) -> Any:
    return generate(seq(commute(*[generate(user(f"write {i}")) for i in range(number)]), user("which?")))


@pytest.mark.parametrize(
    "query",
    [
        "hello",
        user("hello"),
        generate(user("hello")),
        seq(user("hello")),
        fragment("hello"),
        [user("hello")],
        [("user", "hello")],
        [{"role": "user", "content": "hello"}],
    ],
)
def test_many_forms_of_one_question(query: Any) -> None:
    script = Script()
    with session(script) as s:
        assert str(s.run(query)) == " fine"
    assert script.texts() == ["<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"]


def test_what_is_no_question_is_refused_before_an_engine_starts() -> None:
    script = Script()
    s = session(script)
    for wrong, message in (
        (7, "got the number 7"),
        (b"hello", "runs a query, text"),
        (["hello"], "text without a role"),
    ):
        with pytest.raises(QueryError, match=message):
            s.run(wrong)  # type: ignore[arg-type]
    with pytest.raises(QueryError, match="this generate has nothing to read"):
        s.run("")
    with pytest.raises(QueryError, match=r"^\$: generate: model 'n' is neither this session's model nor one of its"):
        s.run(generate(user("hello"), model="n"))
    with pytest.raises(QueryError, match="a run has no option 'temperature'"):
        s.run("hello", temperature=1.0)
    assert script.num_starts == 0
    s.close()


def test_the_engine_starts_once_on_first_use_or_on_entering() -> None:
    script = Script()
    s = session(script)
    assert script.num_starts == 0
    s.run("hello")
    s.run("hello")
    assert (script.num_starts, s.info.name) == (1, "scripted")
    s.close()
    with session(script):
        assert script.num_starts == 2


def test_closing_is_idempotent_and_what_comes_after_is_refused() -> None:
    script = Script()
    with session(script) as s:
        s.run("hello")
    s.close()
    assert script.num_closes == 1
    for use in (s.run, s.explain, s.stream):
        with pytest.raises(EngineUnavailable, match="this session is closed; open another one with Session"):
            use("hello")
    session(script).close()  # never used


def test_closing_ends_what_is_in_flight() -> None:
    script = hanging()
    s = session(script)
    errors: list[BaseException] = []

    def run() -> None:
        try:
            s.run("hello")
        except EngineDied as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: script.submitted)
    begun = time.monotonic()
    s.close()
    thread.join(2)
    assert time.monotonic() - begun < 1
    assert str(errors[0]).startswith("the session was closed while this query ran")
    assert len(script.aborted) == script.num_closes == 1


def test_a_dropped_session_closes_its_engine() -> None:
    script = Script()
    session(script).run("hello")
    gc.collect()
    wait_for(lambda: script.num_closes)


def test_a_start_that_fails_passes_its_error_through_and_may_be_tried_again() -> None:
    script = Script(start_error=EngineUnavailable("no engine here; install one"))
    with pytest.raises(EngineUnavailable, match="no engine here; install one"), session(script):
        pass
    s = session(script)
    with pytest.raises(EngineUnavailable, match="no engine here"):
        s.run("hello")
    script.start_error = None
    assert s.run("hello").text == " fine"
    s.close()


def test_an_unknown_engine_or_option_is_named() -> None:
    with pytest.raises(EngineUnavailable, match="no engine is called 'warp'; known engines: oracle, scripted"):
        Session(engine="warp")
    with (
        pytest.raises(QueryError, match="engine 'scripted' has no option 'wheels'"),
        session(wheels=3) as s,
    ):
        s.run("hello")
    with pytest.raises(QueryError, match="max_concurrency: must be a whole number at least 1, got 0"):
        session(max_concurrency=0)


def test_a_model_that_does_not_exist_is_named_before_vllm_is_loaded() -> None:
    s = Session("nowhere")
    with pytest.raises(ModelError, match="model 'nowhere' is neither a known name nor a directory"):
        s.run("hello")
    s.close()


def test_spans_may_be_required() -> None:
    script = Script(unsupported="it has no rotary embedding")
    with session(script) as s:
        assert s.info.spans_unsupported
    with (
        pytest.raises(SpansUnsupported, match="for m: it has no rotary embedding"),
        session(script, require_spans=True),
    ):
        pass
    assert script.num_closes == 2


def test_options_of_the_session_hold_and_those_of_a_run_win() -> None:
    script = Script()
    query = user(commute("one", "two"), "why?")
    with session(script, rung="moved", anchor="none", max_tokens=5) as s:
        first = s.run(query)
        second = s.run(query, rung="repair(2)", anchor="header", max_tokens=2)
    assert [str(span.rung) for span in first.spans + second.spans] == ["moved"] * 2 + ["repair(2)"] * 2
    assert [request.sampling.max_tokens for request in script.submitted] == [5, 2]
    assert [len(request.prompt.spans[0].anchor) for request in script.submitted] == [0, 3]


def test_samples_and_json_of_a_result() -> None:
    with session() as s:
        result = s.run(generate(user("hello"), n=2, temperature=1.0))
        nested = s.run(judge(2))
    assert [sample.text for sample in result.samples] == [" fine"] * 2
    plain = json.loads(json.dumps(nested.to_dict()))
    assert plain["text"] == " fine"
    assert plain["spans"][0]["rung"] == "moved"
    assert list(plain["inner"]) == ["$.query.operands[0].operands[0]", "$.query.operands[0].operands[1]"]
    assert nested.total_usage.completion == 3


def test_a_stream_gives_events_as_they_happen() -> None:
    with session(Script(answer=lambda r: " a b c", seconds=0.02)) as s:
        times = []
        events = []
        for event in s.stream("hello"):
            times.append(time.monotonic())
            events.append(event)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Done)
    assert [event.text for event in events if isinstance(event, Delta)] == [" a", " b", " c"]
    assert times[3] - times[1] > 0.02


def test_leaving_a_stream_early_aborts_it_within_a_second() -> None:
    script = hanging()
    with session(script) as s:
        events = s.stream(judge())
        assert isinstance(next(events), Started)
        wait_for(lambda: len(script.submitted) == 3)
        begun = time.monotonic()
        events.close()
        assert time.monotonic() - begun < 1
        assert len(script.aborted) == 3
        assert s.run is not None


def test_an_error_reaches_the_reader_of_a_stream() -> None:
    script = Script(answer=lambda r: ValueError("no"), errors_after=1)
    with session(script) as s:
        events = s.stream("hello")
        assert isinstance(next(events), Started)
        with pytest.raises(ValueError, match="no"):
            list(events)
        with pytest.raises(PromptTooLong):
            list(s.stream(" word" * 2000))


def test_run_many_gives_results_in_the_order_of_the_queries() -> None:
    script = Script(answer=lambda request: f" {len(request.prompt)}", seconds=0.02)
    queries = ["word " * number + "end" for number in (5, 1, 3, 2, 4)]
    with session(script, max_concurrency=2) as s:
        results = s.run_many(queries)
        one_by_one = [s.run(query).text for query in queries]
    assert [result.text for result in results] == one_by_one
    assert script.most_running == 2


def test_run_many_stops_at_the_first_error_and_keeps_what_was_done() -> None:
    script = Script(answer=lambda r: " fine", hangs=lambda r: len(r.prompt) == 13)
    with session(script) as s, pytest.raises(PromptTooLong) as caught:
        s.run_many(["hello", "one two three four five", " word" * 2000], timeout=60)
    assert [result and result.text for result in caught.value.results][1:] == [None, None]


def test_retrieves_are_answered_and_may_be_asynchronous() -> None:
    async def find(query: str) -> list[str]:
        await asyncio.sleep(0)
        return [f"about {query}"]

    script = Script()
    with session(script) as s:
        s.run(user(retrieve(find, "the sky"), "why?"))
    assert "about the sky" in script.texts()[0]
    assert len(script.submitted[0].prompt.spans) == 1


def test_a_retriever_that_uses_the_session_from_a_thread_does_not_block_it() -> None:
    script = Script()
    s = session(script)

    def find(query: str) -> list[str]:
        return [s.run(query).text]

    async def on_the_loop(query: str) -> list[str]:
        return [s.run(query).text]

    s.run(user(retrieve(find, "the sky"), "why?"))
    assert len(script.submitted) == 2
    with pytest.raises(QueryError, match="a session was used from its own event loop"):
        s.run(user(retrieve(on_the_loop, "the sky"), "why?"))
    s.close()


@pytest.mark.usefixtures("heeded_interrupts")
def test_an_interrupt_cancels_the_run_and_the_session_goes_on() -> None:
    script = Script(hangs=lambda request: len(script.submitted) == 1)
    with session(script) as s:

        def interrupt() -> None:
            wait_for(lambda: script.submitted)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            s.run("hello")
        thread.join()
        assert len(script.aborted) == 1
        assert s.run("hello").text == " fine"


def test_many_threads_share_one_session() -> None:
    script = Script(seconds=0.1)  # long beside all else, so that four are under way however busy the machine is
    with session(script, max_concurrency=4) as s:
        texts: list[str] = []
        threads = [threading.Thread(target=lambda: texts.append(s.run(judge()).text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert texts == [" fine"] * 8
    assert (script.num_starts, script.most_running) == (1, 4)


def test_progress_goes_where_it_is_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanflow.runner.progress._SECONDS_BETWEEN", 0.0)
    said: list[str] = []
    script = Script()
    with session(script, progress=said.append, max_concurrency=1) as s:
        s.run(judge(5))
    assert said == [f"{number} of 6 generations done" for number in range(1, 7)]
    with session(script, progress=True, max_concurrency=1) as s:
        s.run(judge(5))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("spanflow: ")


def test_explaining_starts_no_engine_and_loads_no_model_where_a_tokenizer_is_given() -> None:
    s = Session("m", engine="simulator", tokenizer=SpeakingTokenizer(), max_model_len=99)
    explanation = s.explain(user(commute("one", "two"), "why?"))
    assert explanation.window == 99
    assert [span.path for span in explanation.generations[0].spans] == [
        "$.query.parts[0].operands[0]",
        "$.query.parts[0].operands[1]",
    ]
    s.close()


def test_a_program_that_forgets_to_close_its_session_ends_in_time(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import asyncio, pytest\n"
        "from scripted_engine import Script, ScriptedEngine, register\n"
        "register(pytest.MonkeyPatch())\n"
        "async def close(self):\n"
        "    await asyncio.to_thread(print, 'closed')\n"
        "ScriptedEngine.close = close\n"
        "from spanflow import Session\n"
        "session = Session('m', engine='scripted', script=Script())\n"
        "print(session.run('hello'))\n"
    )
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr, done.returncode) == (" fine\nclosed\n", "", 0)


def test_the_simulator_takes_answers_over_and_keeps_no_lease() -> None:
    with Session("m", engine="simulator", tokenizer=SpeakingTokenizer()) as s:
        result = s.run(judge())
        assert [(span.status, span.kind, span.computed) for span in result.spans] == [("hit", "generated", 1)] * 3
        deeper = s.run(generate(seq(system("be fair"), commute(judge(), generate(user("x"), n=2)), user("which?"))))
        assert [span.kind for span in deeper.spans] == ["generated"] * 3
        audit = s.on_host(lambda host: host.engine.audit())
        assert (audit["leases"], audit["running"], audit["problems"]) == (0, 0, [])


def test_candidates_inside_a_message_are_part_of_what_it_says() -> None:
    script = Script(answer=lambda request: " yes" if request.prompt.spans else " so")
    with session(script) as s:
        query = generate(user("Judge:", commute(generate("one"), generate("two"), separator=";"), "Which?"))
        result = s.run(query)
    assert result.text == " yes"
    assert script.texts()[-1] == "<|im_start|>user\nJudge: so; so;Which?<|im_end|>\n<|im_start|>assistant\n"
    assert [span.path for span in result.spans] == ["$.query.parts[1].operands[0]", "$.query.parts[1].operands[1]"]
