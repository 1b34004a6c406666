"""The demos from a shell: a table on stdout and progress on stderr, or one document."""

from __future__ import annotations

import io
import json

import pytest
from cli.invoking import invoke
from scripted_engine import Script

from spanflow.cli.output import Output
from spanflow.demo.corpus import load_questions
from spanflow.demo.judge import NUM_REPEATS

pytest.importorskip("bm25s", reason="the retrieval demo needs bm25s")

RAG = ["demo", "rag", "--engine", "scripted", "--questions", "2", "--documents", "3"]
JUDGE = ["demo", "judge", "--engine", "scripted", "--candidates", "2"]


SENTENCE = (
    "The lighthouse has stood by the sea for so long that the sea has come to look like a thing of the lighthouse."
)


class Terminal(io.StringIO):
    """Text for people to see at once."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def demo(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window for the prompts of the demos, and a terminal of 80 columns."""
    script.window = 10_000
    monkeypatch.setenv("COLUMNS", "80")


def test_rag_shows_its_table_and_tells_of_its_progress() -> None:
    done = invoke(*RAG)
    assert done.exit_code == 0
    assert done.stdout.startswith("2 questions over 3 documents each")
    lines = done.stdout.splitlines()
    assert 100 < max(map(len, lines)) <= 120  # a file is no terminal
    assert [line.split()[1:4] for line in lines if line.startswith(" repair(32)")][:4] == [["hit"] * 3] * 4
    assert [line.split()[1] for line in lines if line.startswith(" stock")][-3:] == ["0%"] * 3
    assert "a first question, not counted: " in done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("round ")]
    assert [line[:8] for line in told] == ["round 1:"] * 2 + ["round 2:"] * 2
    assert all(" spans 0." in line and ", stock 0." in line for line in told)


def test_a_terminal_is_as_wide_as_it_is() -> None:
    for stream, width in ((Terminal(), 80), (io.StringIO(), 120)):
        Output(stream, as_json=False).print("so wide " * 40)
        assert width - 10 < max(map(len, stream.getvalue().splitlines())) <= width


def test_rag_says_as_json_what_it_was_asked_and_what_became_of_each_span(script: Script) -> None:
    done = invoke(*RAG, "--json", "--seed", "5", "--rung", "moved")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["rung"], report["num_documents"], report["seed"], report["engine"]) == ("moved", 3, 5, "scripted")
    assert [row["round"] for row in report["rows"]] == [1, 1, 2, 2]
    assert {row["question"] for row in report["rows"]} <= {question.question for question in load_questions()}
    for row in report["rows"]:
        assert row["spans"].keys() == row["stock"].keys() > {"text", "is_correct", "ttft", "reports"}
        assert [(each["status"], each["rung"]) for each in row["spans"]["reports"]] == [("hit", "moved")] * 3
        assert row["stock"]["reports"] == []
        assert len(row["documents"]) == 3
    assert [each["round"] for each in (*report["rounds"], report["summary"])] == [1, 2, 0]
    assert "round 2: " in done.stderr
    other = json.loads(invoke(*RAG, "--json", "--seed", "6").stdout)
    assert [row["question"] for row in other["rows"]] != [row["question"] for row in report["rows"]]


def test_rag_may_leave_full_attention_out(script: Script) -> None:
    done = invoke(*RAG, "--no-compare", "--json")
    assert [row["stock"] for row in json.loads(done.stdout)["rows"]] == [None] * 4
    assert all(request.prompt.spans for request in script.submitted)
    assert "stock" not in done.stderr
    text = invoke(*RAG, "--no-compare").stdout
    assert "2 questions over 3 documents each" in text
    assert "stock" not in text


def test_a_judge_shows_its_tables_and_tells_of_its_progress(script: Script) -> None:
    script.answer = lambda request: SENTENCE
    done = invoke(*JUDGE, "--temperature", "0.5", "--seed", "7")
    assert done.exit_code == 0
    assert "Candidates (seed 8)" in done.stdout
    assert f"Picked with KV taken over: {SENTENCE[:80]}" in done.stdout
    assert ", with 2 candidates at temperature 0.5." in done.stdout
    assert done.stdout.endswith("on the same engine.\n")
    told = [line.partition(":")[0] for line in done.stderr.splitlines() if "judge's first token after" in line]
    assert sorted(told) == ["spans"] * NUM_REPEATS + ["stock"] * NUM_REPEATS


def test_a_judge_says_as_json_what_it_was_asked_and_what_came_of_it(script: Script) -> None:
    done = invoke(*JUDGE, "--json", "--temperature", "0.5", "--seed", "7", "--rung", "moved")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert (report["num_candidates"], report["temperature"], report["engine"]) == (2, 0.5, "scripted")
    for way, num_spans in (("spans", 2), ("stock", 0)):
        assert [run["seed"] for run in report[way]] == [8, 9, 10]
        assert {(len(run["candidates"]), run["num_hit"], run["num_spans"]) for run in report[way]} == {
            (2, num_spans, num_spans)
        }
    assert report["summary"].keys() == {"ttft", "stock_ttft"}
    assert {request.sampling.temperature for request in script.submitted} == {0.0, 0.5}
    assert {span.repair for request in script.submitted for span in request.prompt.spans} == {0}
    assert "judge's first token after" in done.stderr


@pytest.mark.parametrize("number", [1, 25])
def test_a_judge_of_1_or_25_candidates_is_refused(script: Script, number: int) -> None:
    done = invoke("demo", "judge", "--engine", "scripted", "--candidates", number)
    assert (done.exit_code, done.stdout, script.submitted) == (3, "", [])
    assert f"error: num_candidates: must be a whole number from 2 to 24, got {number}" in done.stderr


@pytest.mark.parametrize("number", [2, 24])
def test_a_judge_of_2_or_24_candidates_runs(script: Script, number: int) -> None:
    done = invoke("demo", "judge", "--engine", "scripted", "--candidates", number)
    assert done.exit_code == 0
    assert len(script.submitted) == (NUM_REPEATS + 1) * 2 * (number + 1)
