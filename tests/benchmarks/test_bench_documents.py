"""Documents of a wanted length from the package's corpus and from files."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest

from benchmarks._documents import Asked, Passage, build_documents, load_passages
from spanflow.demo.corpus import is_correct


def count_words(text: str) -> int:
    return len(text.split())


@pytest.mark.parametrize("size", [120, 200, 300])
def test_documents_are_near_their_size_and_hold_their_answers(size: int) -> None:
    documents = build_documents(load_passages(None), size, 12, count_words, random.Random(3))
    longest = max(count_words(s) for p in load_passages(None) for s in p.text.split(". "))
    assert all(abs(count_words(document.text) - size) <= longest for document in documents)
    assert len({document.text for document in documents}) == 12
    asked = [(one, document) for document in documents for one in document.asked]
    assert len(asked) >= size // 40
    assert all(is_correct(document.text, one.answers) for one, document in asked)


def test_the_same_seed_makes_the_same_documents() -> None:
    one, same, other = (
        build_documents(load_passages(None), 150, 6, count_words, random.Random(seed)) for seed in (1, 1, 2)
    )
    assert one == same != other


def test_a_question_whose_answer_is_cut_off_is_left_out() -> None:
    passage = Passage("T", "One two three. The answer is Ailsa Craig.", (Asked("Where?", ("Ailsa Craig",)),))
    (short,) = build_documents([passage, passage], 4, 1, count_words, random.Random(0))
    (long,) = build_documents([passage, passage], 9, 1, count_words, random.Random(0))
    assert (short.text, short.asked) == ("T\nOne two three.", ())
    assert long.asked == passage.asked


def test_passages_are_joined_until_a_document_is_long_enough() -> None:
    passages = [Passage(f"T{n}", f"Words of {n}. More of {n}.") for n in range(4)]
    (document,) = build_documents(passages, 14, 1, count_words, random.Random(0))
    assert document.text.count("\n\n") == 1
    assert count_words(document.text) == 14


def test_too_few_passages_are_said() -> None:
    with pytest.raises(SystemExit, match="too few for 2 documents of 50 tokens; give more with --documents"):
        build_documents([Passage("T", "A few words.")], 50, 2, count_words, random.Random(0))


def test_rows_of_a_file_with_questions(tmp_path: Path) -> None:
    rows = [
        {"question": "where?", "answers": ["Las Vegas"], "title": "Dragons", "text": "A band from Las Vegas."},
        {"title": "Only text", "text": "No question."},
    ]
    path = tmp_path / "gold.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    assert load_passages(path) == [
        Passage("Dragons", "A band from Las Vegas.", (Asked("where?", ("Las Vegas",)),)),
        Passage("Only text", "No question."),
    ]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b'{"title": "T"}', "rows.jsonl:1: 'text' must be some text; the row has title"),
        (b'\n{"title": "T", "text": "x"', "rows.jsonl:2: is not JSON"),
        (b"[1]", "rows.jsonl:1: is a JSON list"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, written: bytes, message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(written)
    with pytest.raises(SystemExit, match=message):
        load_passages(path)
    with pytest.raises(SystemExit, match="cannot be read"):
        load_passages(tmp_path / "none.jsonl")
