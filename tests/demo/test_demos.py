"""The demos on a scripted engine and on the simulator: fair, complete, and drawn without surprises."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from typing import Any

import pytest
from rich.console import Console
from scripted_engine import Script, ScriptedEngine, SpeakingTokenizer, register

from spanflow import QueryError, Session
from spanflow.cli.tables import describe_judged, describe_row, judge_tables, rag_tables
from spanflow.demo.corpus import is_correct, load_documents
from spanflow.demo.judge import NUM_REPEATS, run_judge
from spanflow.demo.rag import NUM_ROUNDS, Answered, RagReport, Row, run_rag
from spanflow.engine.context import computed_whole
from spanflow.engine.protocol import EngineRequest, SpanReport
from spanflow.ir.fidelity import MOVED
from spanflow.result import SpanResult

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
    assert re.search(r"\n repair\(32\) +100% hit +100% .* All rounds: 6 answers.*\n stock +0% ", text)
    assert text.count("✓") == text.count("✗") == 6
    assert describe_row(report.rows[0]).startswith(f"round 1: {report.rows[0].question}  spans ")
    assert json.loads(json.dumps(report.to_dict()))["summary"]["num_questions"] == 6


def test_the_reports_of_all_documents_are_kept(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(self: ScriptedEngine, request: EngineRequest) -> tuple[SpanReport, ...]:
        found = zip(request.prompt.spans, ("hit", "new", "evicted"), strict=False)
        return tuple(SpanReport(s.start, s.end, status, len(s) - 2, 2) for s, status in found)

    monkeypatch.setattr(ScriptedEngine, "_reports", mixed)
    report = ask(script, rung="repair(2)")
    asked = [request for request in script.submitted[2:] if request.prompt.spans]
    texts = {document.id: document.text for document in load_documents()}
    for row, data, request in zip(report.rows, report.to_dict()["rows"], asked, strict=True):
        spans = request.prompt.spans
        assert [(each.start, each.end) for each in row.spans.reports] == [(span.start, span.end) for span in spans]
        said = [script.tokenizer.decode(request.prompt.token_ids[span.start : span.end]) for span in spans]
        assert all(texts[name] in text for name, text in zip(row.documents, said, strict=True))
        assert data["documents"] == row.documents
        assert [each["status"] for each in data["spans"]["reports"]] == ["hit", "new", "evicted"]
        assert {each["rung"] for each in data["spans"]["reports"]} == {"repair(2)"}
        assert sum(each["moved"] for each in data["spans"]["reports"]) == data["spans"]["moved"] > 0
        assert sum(each["repaired"] for each in data["spans"]["reports"]) == data["spans"]["repaired"] == 6
        assert data["stock"]["reports"] == []
    assert "hit new evicted" in shown(rag_tables(report))


def test_one_table_has_answers_reports_times_and_totals() -> None:
    def answered(text: str, ttft: float, computed: int, statuses: str = "", internal: int = 0) -> Answered:
        spans = [
            SpanResult("$", number, number + 1, MOVED, "header", "text", status)  # type: ignore[arg-type]
            for number, status in enumerate(statuses.split())
        ]
        hits = statuses.split().count("hit")
        right = is_correct(text, ["sheep"])
        return Answered(text, right, ttft, 900, len(spans), hits, 0, 0, computed, internal, tuple(spans))

    def row(number: int, question: str, spans: Answered, stock: Answered) -> Row:
        return Row(number, question, ("sheep",), ("a", "b", "c", "d"), spans, stock)

    who, how = "Who ate it?", "What does a keeper of a lighthouse keep, when nobody is looking and the lamp is out?"
    rows = (
        row(1, who, answered("A sheep.", 1.5, 100, "new new hit new", 800), answered("wolf", 1, 900)),
        row(1, how, answered("cows", 0.75, 104, "hit hit new hit"), answered("sheep", 1.2, 900)),
        row(2, who, answered("sheep", 0.2, 100, "hit hit hit hit"), answered("a\nwolf", 1, 900)),
        row(2, how, answered("sheep", 0.2, 104, "hit hit hit hit"), answered("sheep", 1.2, 900)),
    )
    report = RagReport(rows, "repair(32)", 4, 0, "vllm", "smollm2", "", {})
    table, *notes = rag_tables(report)
    assert shown([table], width=120).rstrip("\n") == TABLE.rstrip("\n")
    assert all(isinstance(note, str) for note in notes)
    narrow = shown([table], width=80)
    assert max(map(len, narrow.split("\n"))) <= 80
    assert "…" not in narrow


TABLE = """\
2 questions over 4 documents each

 way         documents        right    TTFT  ratio  computed  question and answers
 ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────
                                                              Round 1: the first time
                                                              Who ate it?
 repair(32)  new new hit new      ✓  1.500s   0.7x   100+800  A sheep.
 stock                            ✗  1.000s              900  wolf
                                                              What does a keeper of a lighthouse keep, when nobody is
                                                              looking and the lamp is out?
 repair(32)  hit hit new hit      ✗  0.750s   1.6x       104  cows
 stock                            ✓  1.200s              900  sheep

                                                              Round 2: the same questions, documents in another order
                                                              Who ate it?
 repair(32)  hit hit hit hit      ✓  0.200s   5.0x       100  sheep
 stock                            ✗  1.000s              900  a wolf
                                                              What does a keeper of a lighthouse keep, when nobody is
                                                              looking and the lamp is out?
 repair(32)  hit hit hit hit      ✓  0.200s   6.0x       104  sheep
 stock                            ✓  1.200s              900  sheep

 repair(32)  50% hit            50%  1.125s   1.0x     1,004  Round 1: 2 answers, median TTFT
 stock                          50%  1.100s            1,800
 repair(32)  100% hit          100%  0.200s   5.5x       204  Round 2: 2 answers, median TTFT
 stock                          50%  1.100s            1,800
 repair(32)  75% hit            75%  0.475s   2.3x     1,208  All rounds: 4 answers, median TTFT
 stock                          50%  1.100s            3,600
"""


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


@pytest.mark.parametrize("number", [2, 24])
def test_a_judge_reads_from_2_to_24_candidates(script: Script, number: int) -> None:
    script.answer = lambda request: f" number {request.sampling.seed}" if request.sampling.temperature else " that"
    with Session("m", engine="scripted", script=script) as session:
        report = run_judge(session, num_candidates=number)
    for judged in (*report.spans, *report.stock):
        assert len(judged.candidates) == number
        assert len(set(judged.candidates)) == number  # each has a seed of its own
    assert {judged.num_spans for judged in report.spans} == {number}
    outer = [request for request in script.submitted if not request.sampling.temperature]
    assert len(script.submitted) == len(outer) * (number + 1) == (NUM_REPEATS + 1) * 2 * (number + 1)
    assert f" {number}  number " in shown(judge_tables(report))


@pytest.mark.parametrize("number", [-1, 0, 1, 25, 1000])
def test_a_judge_of_fewer_or_more_candidates_is_refused(script: Script, number: int) -> None:
    wanted = f"num_candidates: must be a whole number from 2 to 24, got {number}"
    with Session("m", engine="scripted", script=script) as session, pytest.raises(QueryError, match=wanted):
        run_judge(session, num_candidates=number)
    assert (script.submitted, script.num_starts) == ([], 1)


def reports(self: ScriptedEngine, request: EngineRequest) -> tuple[SpanReport, ...]:
    """As engines report them: what is repaired whole is looked for by nobody."""
    return tuple(computed_whole(s) or SpanReport(s.start, s.end, "hit", len(s)) for s in request.prompt.spans)


def test_a_short_candidate_under_repair_is_no_miss(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it is moved, so it can't be a hit; those that are moved all are."""
    monkeypatch.setattr(ScriptedEngine, "_reports", reports)
    script.answer = lambda request: " so" * (40 if request.sampling.seed in longer else 1)
    longer: set[int | None] = set()
    with Session("m", engine="scripted", script=script, rung="repair(32)") as session:
        short = run_judge(session, num_candidates=3)
        inner = [request.sampling.seed for request in script.submitted if request.sampling.temperature]
        longer.update(seed for number, seed in enumerate(inner) if number % 3)
        mixed = run_judge(session, num_candidates=3)
    assert {(judged.num_hit, judged.num_spans) for judged in short.spans} == {(0, 0)}
    assert {(judged.num_hit, judged.num_spans) for judged in mixed.spans} == {(2, 2)}
    assert "2/2" in shown(judge_tables(mixed))
    assert "0/3" not in shown(judge_tables(short))


@pytest.mark.parametrize(
    ("rung", "share", "totals"),
    [("moved", 1.0, r" moved +100% hit +0% "), ("repair(9999)", None, r" repair\(9999\) +0% ")],
)
def test_documents_that_are_repaired_whole_are_no_misses(
    script: Script, monkeypatch: pytest.MonkeyPatch, rung: str, share: float | None, totals: str
) -> None:
    monkeypatch.setattr(ScriptedEngine, "_reports", reports)
    report = ask(script, rung=rung)
    assert {row.spans.num_spans for row in report.rows} == {3 if share else 0}
    assert report.summary().share_hit == share
    assert re.search(rf"\n{totals}.* All rounds: 6 answers", shown(rag_tables(report), width=200))


def test_what_a_model_says_is_no_markup(script: Script) -> None:
    script.answer = lambda request: " [bold]loud[/bold] [/nothing]"
    report = ask(script)
    assert "[bold]loud[/bold]" in shown(rag_tables(report), width=200)
