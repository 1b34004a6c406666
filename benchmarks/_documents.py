"""Documents of a wanted length, each with questions that it answers, from the package's corpus or from a file."""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spanflow.demo.corpus import is_correct, load_documents, load_questions

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass(frozen=True, slots=True)
class Asked:
    """A question and the accepted spellings of its answer."""

    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Passage:
    """A titled text and the questions that it answers."""

    title: str
    text: str
    asked: tuple[Asked, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """What stands in a prompt as one operand, and the questions whose answers it holds."""

    text: str
    asked: tuple[Asked, ...]


def load_passages(path: Path | None) -> list[Passage]:
    """The package's corpus, or the rows of a JSON Lines file (also .gz) with `title` and `text`, and perhaps
    `question` and `answers`. Raises SystemExit that names file and line."""
    if path is None:
        questions: dict[str, list[Asked]] = {}
        for known in load_questions():
            questions.setdefault(known.document, []).append(Asked(known.question, known.answers))
        return [Passage(d.title, d.text, tuple(questions.get(d.id, ()))) for d in load_documents()]
    return [_passage(row, where) for where, row in _rows(path)]


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = content.decode("utf-8").split("\n")
    except (OSError, ValueError, EOFError) as error:
        raise SystemExit(f"--documents {path}: cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SystemExit(f"{path}:{number}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise SystemExit(f"{path}:{number}: is a JSON {type(row).__name__}; write one object a line")
        yield f"{path}:{number}", row


def _passage(row: dict[str, Any], where: str) -> Passage:
    for key in ("title", "text"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise SystemExit(f"{where}: {key!r} must be some text; the row has {', '.join(row) or 'no keys'}")
    question, answers = row.get("question"), row.get("answers")
    asked = (Asked(str(question), tuple(map(str, answers))),) if question and isinstance(answers, list) else ()
    return Passage(row["title"], row["text"], asked)


def build_documents(
    passages: Sequence[Passage], size: int, count: int, count_tokens: Callable[[str], int], rng: random.Random
) -> list[Document]:
    """`count` documents of about `size` tokens each: whole sentences of passages in a drawn order, as near to `size`
    as they come. Questions whose answer was cut off are left out. Raises SystemExit where passages run out."""
    order = list(passages)
    rng.shuffle(order)
    rest = iter(order)
    return [_document(rest, size, count_tokens, f"{count} documents of {size} tokens") for _ in range(count)]


def _document(rest: Iterator[Passage], size: int, count_tokens: Callable[[str], int], wanted: str) -> Document:
    text, length, asked = "", 0, list[Asked]()
    while True:
        passage = next(rest, None)
        if passage is None:
            raise SystemExit(f"the passages are too few for {wanted}; give more with --documents")
        opening = f"\n\n{passage.title}\n" if text else f"{passage.title}\n"
        for number, sentence in enumerate(_SENTENCE_END.split(passage.text.strip())):
            piece = opening + sentence
            more = count_tokens(piece)
            if text and abs(size - length - more) >= abs(size - length):
                return Document(text, tuple(one for one in asked if is_correct(text, one.answers)))
            text, length, opening = text + piece, length + more, " "
            if not number:
                asked += passage.asked
