"""The demos on a scripted engine and on the simulator: fair, complete, and drawn without surprises."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from functools import partial
from typing import Any

import pytest
from rich.console import Console
from scripted_engine import Script, ScriptedEngine, SpeakingTokenizer, register

from spanflow import QueryError, Session
from spanflow.api.combinators import commute
from spanflow.cli.tables import describe_judged, describe_row, judge_tables, rag_tables
from spanflow.demo.judge import NUM_REPEATS, run_judge
from spanflow.demo.rag import NUM_ROUNDS, RagReport, Row, run_rag
from spanflow.engine.context import computed_whole
from spanflow.engine.protocol import EngineRequest, SpanReport

pytest.importorskip("bm25s", reason="the retrieval demo needs bm25s")


def shown(parts: list[Any], width: int = 100) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(*parts, sep="\n", highlight=False)
    return re.sub(r" *\n", "\n", file.getvalue())


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Script:
    register(monkeypatch)
    return Script(window=10_000)


def ask(script: Script, **options: Any) -> RagReport:
    with Session("m", engine="scripted", script=script) as session:
        return run_rag(session, num_questions=3, num_documents=3, **options)


def test_each_question_is_asked_both_ways_in_two_rounds_with_one_order_of_documents(script: Script) -> None:
    rows: list[Row] = []
    report = ask(script, on_row=rows.append)
    assert report.rows == tuple(rows)
    assert [row.round for row in report.rows] == [1] * 3 + [2] * 3
    assert report.rung == "repair(32)"
    asked = script.submitted[2:]  # without the question that warms the engine up
    pairs = list(zip(asked[::2], asked[1::2], strict=True))
    assert len(pairs) == NUM_ROUNDS * 3
    for one, other in pairs:
        texts = {script.tokenizer.decode(request.prompt.token_ids) for request in (one, other)}
        assert len(texts) == 1
        assert sorted(bool(request.prompt.spans) for request in (one, other)) == [False, True]
    first = [bool(one.prompt.spans) for one, _ in pairs]
    assert Counter(first) == {True: 3, False: 3}
    assert first[:3] != first[3:]


def test_the_second_round_brings_other_orders_and_the_seed_decides(script: Script) -> None:
    def orders(script: Script) -> list[str]:
        return [script.tokenizer.decode(request.prompt.token_ids) for request in script.submitted]

    ask(script)
    again, other = Script(window=10_000), Script(window=10_000)
    ask(again)
    ask(other, seed=1)
    assert orders(again) == orders(script)
    assert orders(other) != orders(script)
    assert set(orders(script)[2:8]) != set(orders(script)[8:])


def test_without_comparison_nothing_is_asked_the_stock_way(script: Script) -> None:
    report = ask(script, compare=False, rung="moved")
    assert len(script.submitted) == 1 + NUM_ROUNDS * 3
    assert all(request.prompt.spans for request in script.submitted)
    assert all(row.stock is None for row in report.rows)
    assert report.summary().stock_ttft is None
    assert "stock" not in shown(rag_tables(report))


def test_accuracy_counts_the_questions_that_were_answered(script: Script) -> None:
    from spanflow.demo.corpus import load_questions

    answers = {question.question: question.answers[0] for question in load_questions()}

    def answer(request: EngineRequest) -> str:
        text = script.tokenizer.decode(request.prompt.token_ids)
        (found,) = (answer for question, answer in answers.items() if question in text)
        return f" {found}" if request.prompt.spans else " no idea"

    script.answer = answer
    report = ask(script)
    assert (report.summary().accuracy, report.summary().stock_accuracy) == (1.0, 0.0)
    text = shown(rag_tables(report))
    assert "100% of spans hit, 100% right (stock: 0%)" in text
    assert text.count("✓") == text.count("✗") == 6
    assert describe_row(report.rows[0]).startswith(f"round 1: {report.rows[0].question}  spans ")
    assert json.loads(json.dumps(report.to_dict()))["summary"]["num_questions"] == 6


@pytest.mark.parametrize("numbers", [{"num_questions": 0}, {"num_questions": 10_000}, {"num_documents": 0}])
def test_numbers_out_of_range_are_refused(script: Script, numbers: dict[str, int]) -> None:
    with Session("m", engine="scripted", script=script) as session, pytest.raises(QueryError, match="num_"):
        run_rag(session, **numbers)
    assert script.submitted == []


def test_on_the_simulator_the_second_round_finds_all_spans() -> None:
    with Session("m", engine="simulator", tokenizer=SpeakingTokenizer(), num_blocks=4096) as session:
        report = run_rag(session, num_questions=4, num_documents=3)
    first, second = report.summary(1), report.summary(2)
    assert first.share_hit < 1
    assert second.share_hit == 1
    assert second.num_computed < first.num_computed
    assert second.stock_num_computed is not None
    assert second.num_computed < second.stock_num_computed / 3


def test_both_judges_read_the_same_candidates_and_only_one_takes_them_over(script: Script) -> None:
    script.answer = lambda request: " a" if request.sampling.seed is None else f" number {request.sampling.seed}"
    with Session("m", engine="scripted", script=script) as session:
        report = run_judge(session, num_candidates=3, temperature=0.5)
    assert len(report.spans) == len(report.stock) == NUM_REPEATS
    by_seed = {judged.seed: judged.candidates for judged in report.spans}
    assert by_seed == {judged.seed: judged.candidates for judged in report.stock}
    assert len(set(by_seed.values())) == NUM_REPEATS
    assert {judged.num_spans for judged in report.spans} == {3}
    assert {judged.num_spans for judged in report.stock} == {0}
    assert all(request.sampling.temperature in (0.0, 0.5) for request in script.submitted)
    text = shown(judge_tables(report))
    assert "Picked with KV taken over: a" in text
    assert "3 candidates at temperature 0.5" in text
    assert describe_judged("spans", report.spans[0]).startswith("spans: 3 candidates, judge's first token after")
    assert json.loads(json.dumps(report.to_dict()))["num_candidates"] == 3


def reports(self: ScriptedEngine, request: EngineRequest) -> tuple[SpanReport, ...]:
    """As engines report them: what is repaired whole is looked for by nobody."""
    return tuple(computed_whole(s) or SpanReport(s.start, s.end, "hit", len(s)) for s in request.prompt.spans)


def test_a_short_candidate_under_repair_is_no_miss(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is moved, so it can't be a hit; those that are moved all are."""
    monkeypatch.setattr(ScriptedEngine, "_reports", reports)
    monkeypatch.setattr("spanflow.demo.judge.commute", partial(commute, rung="repair(32)"))
    script.answer = lambda request: " so" * (40 if request.sampling.seed in longer else 1)
    longer: set[int | None] = set()
    with Session("m", engine="scripted", script=script) as session:
        short = run_judge(session, num_candidates=3)
        inner = [request.sampling.seed for request in script.submitted if request.sampling.temperature]
        longer.update(seed for number, seed in enumerate(inner) if number % 3)
        mixed = run_judge(session, num_candidates=3)
    assert {(judged.num_hit, judged.num_spans) for judged in short.spans} == {(0, 0)}
    assert {(judged.num_hit, judged.num_spans) for judged in mixed.spans} == {(2, 2)}
    assert "2/2" in shown(judge_tables(mixed))
    assert "0/3" not in shown(judge_tables(short))


@pytest.mark.parametrize(
    ("rung", "share", "sentence"),
    [("moved", 1.0, "100% of spans hit, 0% right"), ("repair(9999)", None, "documents each: 0% right")],
)
def test_documents_that_are_repaired_whole_are_no_misses(
    script: Script, monkeypatch: pytest.MonkeyPatch, rung: str, share: float | None, sentence: str
) -> None:
    monkeypatch.setattr(ScriptedEngine, "_reports", reports)
    report = ask(script, rung=rung)
    assert {row.spans.num_spans for row in report.rows} == {3 if share else 0}
    assert report.summary().share_hit == share
    assert sentence in shown(rag_tables(report), width=200)


def test_what_a_model_says_is_no_markup(script: Script) -> None:
    script.answer = lambda request: " [bold]loud[/bold] [/nothing]"
    report = ask(script)
    assert "[bold]loud[/bold]" in shown(rag_tables(report), width=200)
