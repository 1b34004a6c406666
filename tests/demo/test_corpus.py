"""The demo corpus holds what it promises, its retriever finds it, and bad rows are named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanflow.demo.corpus import (
    Bm25Retriever,
    Document,
    Question,
    as_fragment,
    is_correct,
    load_documents,
    load_questions,
)
from spanflow.errors import EngineUnavailable, QueryError
from spanflow.ir.nodes import Fragment

DOCUMENTS = load_documents()
QUESTIONS = load_questions()
TEXTS = {document.id: document.text for document in DOCUMENTS}


def write(path: Path, *rows: object) -> Path:
    """A JSON Lines file; a row that is text already is written as it stands."""
    lines = (row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def retriever() -> Bm25Retriever:
    pytest.importorskip("bm25s", reason="retrieval needs bm25s")
    return Bm25Retriever()


# The corpus


def test_there_are_enough_documents_and_questions() -> None:
    assert len(DOCUMENTS) >= 64
    assert len(QUESTIONS) >= 40


def test_documents_are_unique() -> None:
    for field in ("id", "title", "text"):
        values = [getattr(document, field) for document in DOCUMENTS]
        assert len(set(values)) == len(values), field


def test_questions_are_unique() -> None:
    assert len({question.question for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.id)
def test_documents_are_alike_in_form_and_size(document: Document) -> None:
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", document.id)
    assert 190 <= len(document.text.split()) <= 260
    assert document.text == document.text.strip()
    assert document.title == document.title.strip()
    assert document.text.endswith(".")
    assert "  " not in document.text


def test_no_sentence_stands_in_two_documents() -> None:
    sentences = [s for document in DOCUMENTS for s in re.split(r"(?<=\.)\s+", document.text) if len(s.split()) > 5]
    assert len(set(sentences)) == len(sentences)


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.question)
def test_each_answer_is_short_and_stands_in_its_document_and_not_in_its_question(question: Question) -> None:
    assert question.question.endswith("?")
    for answer in question.answers:
        assert answer in TEXTS[question.document]
        assert is_correct(TEXTS[question.document], [answer])
        assert not is_correct(question.question, [answer])
        assert len(answer.split()) <= 4


def test_every_document_is_asked_about() -> None:
    assert {question.document for question in QUESTIONS} == set(TEXTS)


# The retriever


def test_bm25_finds_the_document_of_nearly_every_question(retriever: Bm25Retriever) -> None:
    missed = [q.question for q in QUESTIONS if q.document not in {f.id for f in retriever.retrieve(q.question, 4)}]
    assert len(missed) <= 0.05 * len(QUESTIONS), missed


def test_a_result_is_a_fragment_of_title_and_text(retriever: Bm25Retriever) -> None:
    (fragment,) = retriever.retrieve("Which pigment gives saffron its yellow colour?", 1)
    (document,) = (document for document in DOCUMENTS if document.id == "saffron")
    assert fragment == Fragment(f"Saffron\n{document.text}", id="saffron", metadata={"title": "Saffron"})
    assert fragment == as_fragment(document)


def test_results_come_best_first_and_ties_in_the_order_of_the_corpus() -> None:
    pytest.importorskip("bm25s", reason="retrieval needs bm25s")
    retriever = Bm25Retriever(
        [
            Document("none", "Bread", "flour water salt"),
            Document("once", "Honey", "bees flowers comb"),
            Document("twice", "Bees", "bees swarm comb"),
            Document("also-none", "Iron", "ore coke limestone"),
        ]
    )
    assert [f.id for f in retriever.retrieve("bees", 9)] == ["twice", "once", "none", "also-none"]
    for query in ("", "the", "unheard"):
        assert [f.id for f in retriever.retrieve(query, 2)] == ["none", "once"]


def test_a_corpus_without_a_word_to_index_is_returned_in_order() -> None:
    pytest.importorskip("bm25s", reason="retrieval needs bm25s")
    retriever = Bm25Retriever([Document("a", "the", "of"), Document("b", "a", "an")])
    assert [f.id for f in retriever.retrieve("stone", 4)] == ["a", "b"]


def test_retrieving_needs_documents_a_text_and_a_number(retriever: Bm25Retriever) -> None:
    with pytest.raises(QueryError, match="nothing to search in 0 documents; pass at least one"):
        Bm25Retriever([])
    with pytest.raises(QueryError, match=r"Bm25Retriever\.retrieve: k: must be a whole number at least 1, got 0"):
        retriever.retrieve("saffron", 0)
    with pytest.raises(QueryError, match=r"Bm25Retriever\.retrieve: query: must be text"):
        retriever.retrieve(7, 1)  # type: ignore[arg-type]


def test_without_bm25s_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(EngineUnavailable, match=r"bm25s.*run pip install -e '\.\[retrieval\]'"):
        Bm25Retriever(DOCUMENTS)


def test_loading_the_corpus_loads_no_heavy_package() -> None:
    code = (
        "import sys, spanflow.demo.corpus as corpus; corpus.load_documents(); corpus.load_questions()\n"
        "sys.exit(', '.join({'bm25s', 'torch', 'transformers', 'vllm', 'networkx'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Right answers


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("Clara Rockmore", ["Clara Rockmore"]),
        ("It was CLARA ROCKMORE, a violinist.", ["Clara Rockmore"]),
        ("the Angara river", ["Angara"]),
        ("Ashmolean Museum", ["The Ashmolean Museum"]),
        ("Michel Breal", ["Michel Bréal"]),
        ("Rontgen", ["Röntgen"]),
        ("It holds 7089 digits.", ["7,089"]),
        ("It holds 7,089 digits", ["7089"]),
        ("for 15.9 million dollars.", ["15.9 million"]),
        ("It was *Ancon*", ["Ancon"]),
        ("_Ancon_", ["Ancon"]),
        ("Hawke’s Bay", ["Hawke's Bay"]),
        ("Le Verrier's letter", ["Le Verrier"]),
        ("made of qoya grass", ["q'oya"]),
        ("FOTON M3", ["FOTON-M3"]),
        ("Rockmore", ["Clara Rockmore", "Rockmore"]),
    ],
)
def test_right_answers(answer: str, accepted: list[str]) -> None:
    assert is_correct(answer, accepted)


@pytest.mark.parametrize(
    ("answer", "accepted"),
    [
        ("", ["Clara Rockmore"]),
        ("Clara", ["Clara Rockmore"]),
        ("Rockmore Clara", ["Clara Rockmore"]),
        ("a tune", ["tun"]),
        ("1642", ["642"]),
        ("15.9 million", ["9 million"]),
        ("15.9 million", ["15"]),
        ("1, 642", ["1,642"]),
        ("anything", []),
        ("anything", [""]),
        ("the answer", ["the"]),
        ("a ? b", ["?"]),
    ],
)
def test_wrong_answers(answer: str, accepted: list[str]) -> None:
    assert not is_correct(answer, accepted)


@given(st.sampled_from(QUESTIONS), st.text(max_size=20), st.text(max_size=20))
def test_an_accepted_answer_is_right_in_any_company(question: Question, before: str, behind: str) -> None:
    answer = f"{before} | {question.answers[0].upper()} | {behind}"
    assert is_correct(answer, question.answers)


# A user's own files


def test_own_files_are_read(tmp_path: Path) -> None:
    documents = write(
        tmp_path / "d.jsonl", "\ufeff", {"id": "a", "title": "A", "text": "x\u2028y", "more": 1}, "", "  "
    )
    questions = write(tmp_path / "q.jsonl", {"question": "Who?", "answers": ["Ann", "Anna"], "document": "a"})
    assert load_documents(documents) == (Document("a", "A", "x\u2028y"),)
    assert load_questions(questions) == (Question("Who?", ("Ann", "Anna"), "a"),)


def test_line_separators_inside_a_text_do_not_cut_a_row(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", '{"id": "a", "title": "A", "text": "x\u2028y\x85z"}')
    assert load_documents(path)[0].text == "x\u2028y\x85z"


GOOD_DOCUMENT = {"id": "a", "title": "A", "text": "words"}
GOOD_QUESTION = {"question": "Who?", "answers": ["Ann"], "document": "a"}


@pytest.mark.parametrize(
    ("load", "good", "bad", "message"),
    [
        (load_documents, GOOD_DOCUMENT, "{", r"is not JSON \(.*\); write one JSON object a line"),
        (load_documents, GOOD_DOCUMENT, [1], r"is a JSON list; write one JSON object a line"),
        (load_documents, GOOD_DOCUMENT, {"id": "b", "title": "B"}, r"'text' is missing; the row has 'id', 'title'"),
        (load_documents, GOOD_DOCUMENT, {}, r"'id' is missing; the row has no keys"),
        (load_documents, GOOD_DOCUMENT, {"id": 7, "title": "B", "text": "x"}, r"'id': must be text, got 7"),
        (load_documents, GOOD_DOCUMENT, {"id": "b", "title": " ", "text": "x"}, r"'title': is empty"),
        (load_documents, GOOD_DOCUMENT, {"id": "b", "title": "B", "text": "\ud800"}, r"'text': the character at pos"),
        (load_documents, GOOD_DOCUMENT, GOOD_DOCUMENT, r"the id 'a' stands in line 1 already; give each document"),
        (load_questions, GOOD_QUESTION, {"question": "Who?", "document": "a"}, r"'answers' must be a list of at least"),
        (load_questions, GOOD_QUESTION, {**GOOD_QUESTION, "answers": "Ann"}, r"'answers' must be a list of at least"),
        (load_questions, GOOD_QUESTION, {**GOOD_QUESTION, "answers": []}, r"'answers' must be a list of at least"),
        (load_questions, GOOD_QUESTION, {**GOOD_QUESTION, "answers": ["x", 2]}, r"'answers'\[1\]: must be text, got 2"),
        (load_questions, GOOD_QUESTION, {**GOOD_QUESTION, "answers": [""]}, r"'answers'\[0\]: is empty"),
        (load_questions, GOOD_QUESTION, {"answers": ["x"], "document": "a"}, r"'question' is missing"),
        (load_questions, GOOD_QUESTION, {"question": "Who?", "answers": ["x"]}, r"'document' is missing"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    tmp_path: Path, load: Callable[[Path], object], good: object, bad: object, message: str
) -> None:
    path = write(tmp_path / "rows.jsonl", good, "", bad)
    with pytest.raises(QueryError, match=rf"rows\.jsonl:3: {message}"):
        load(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match=r"absent\.jsonl: cannot be read \(No such file or directory\); pass the path"):
        load_documents(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"id": "\xe9"}')
    with pytest.raises(QueryError, match=r"latin\.jsonl: byte 8 is not UTF-8; save the file as UTF-8"):
        load_documents(tmp_path / "latin.jsonl")
    with pytest.raises(QueryError, match=r"empty\.jsonl: holds no rows; write one JSON object a line"):
        load_questions(write(tmp_path / "empty.jsonl", "", ""))
