"""A small corpus with questions about it, a BM25 retriever, and the rule by which an answer counts as right."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from spanflow.errors import EngineUnavailable, QueryError
from spanflow.installing import install_advice
from spanflow.ir.nodes import Fragment
from spanflow.ir.ranges import check_count, check_text

_ARTICLES = frozenset(("a", "an", "the"))
_THOUSANDS_COMMA = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_POSSESSIVE = re.compile(r"(?<=\w)['’]s\b")
_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")
_WORD = re.compile(r"\d+(?:\.\d+)+|[^\W_]+")  # 15.9 is one word


@dataclass(frozen=True, slots=True)
class Document:
    """A text of the corpus under its title; `id` is unique in the corpus."""

    id: str
    title: str
    text: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the spellings of its answer, and the id of the document that holds it.

    The first answer is the one to measure likelihoods with.
    """

    question: str
    answers: tuple[str, ...]
    document: str


def load_documents(path: Path | None = None) -> tuple[Document, ...]:
    """The documents of a JSON Lines file with `id`, `title` and `text` a row; of the package's own by default.

    Other keys of a row are ignored, and so are blank lines. Raises QueryError that names the file and the line.
    """
    documents: dict[str, Document] = {}
    lines: dict[str, int] = {}
    for where, line, row in _rows(path, "documents.jsonl"):
        document = Document(_text(row, "id", where), _text(row, "title", where), _text(row, "text", where))
        if document.id in documents:
            raise QueryError(
                f"{where}: the id {document.id!r} stands in line {lines[document.id]} already; "
                "give each document an id of its own"
            )
        documents[document.id] = document
        lines[document.id] = line
    return tuple(documents.values())


def load_questions(path: Path | None = None) -> tuple[Question, ...]:
    """The questions of a JSON Lines file with `question`, `answers` and `document` a row; the package's by default.

    The package's own were kept because SmolLM2-135M-Instruct answers each, greedily, from its document alone: what
    they measure is what is lost among other documents, or by reuse, and not how able a model is.

    Other keys of a row are ignored, and so are blank lines. Raises QueryError that names the file and the line.
    """
    return tuple(
        Question(_text(row, "question", where), _answers(row, where), _text(row, "document", where))
        for where, _, row in _rows(path, "questions.jsonl")
    )


def as_fragment(document: Document) -> Fragment:
    """A document as a part of a prompt: its title, a line break, its text."""
    return Fragment(f"{document.title}\n{document.text}", id=document.id, metadata={"title": document.title})


class Bm25Retriever:
    """Ranks documents by the words that they share with a query (Okapi BM25, by the package bm25s).

    `documents` of None means the package's own. Raises EngineUnavailable where bm25s is not installed,
    and QueryError for no documents.
    """

    def __init__(self, documents: Sequence[Document] | None = None) -> None:
        self._bm25s = _import_bm25s()
        documents = load_documents() if documents is None else tuple(documents)
        if not documents:
            raise QueryError("Bm25Retriever: there is nothing to search in 0 documents; pass at least one")
        self._fragments = tuple(as_fragment(document) for document in documents)
        self._words = [self._split(fragment.text) for fragment in self._fragments]
        self._index = None
        if any(self._words):  # the index refuses a corpus without a single word
            self._index = self._bm25s.BM25()
            self._index.index(self._words, show_progress=False)

    def retrieve(self, query: str, k: int = 4) -> list[Fragment]:
        """The `k` best documents for a query (all of them if there are fewer), best first, ties in corpus order.

        Raises QueryError for a query that is not text, or a k below 1.
        """
        check_text(query, "Bm25Retriever.retrieve: query")
        check_count(k, "Bm25Retriever.retrieve: k", 1)
        order = np.argsort(-self._scores(query), kind="stable")
        return [self._fragments[index] for index in order[:k]]

    def _scores(self, query: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        words = self._split(query)
        if self._index is None or not words:
            return np.zeros(len(self._fragments), dtype=np.float32)
        return np.asarray(self._index.get_scores(words), dtype=np.float32)

    def _split(self, text: str) -> list[str]:
        (words,) = self._bm25s.tokenize([text], stopwords="en", return_ids=False, show_progress=False)
        return list(words)


def is_correct(answer: str, accepted: Sequence[str]) -> bool:
    """Whether one of the accepted answers stands in `answer`, word for word.

    Case, accents, punctuation, articles, possessive endings and commas between thousands do not count.
    """
    found = f" {_normalised(answer)} "
    wanted = (_normalised(spelling) for spelling in accepted)
    return any(words and f" {words} " in found for words in wanted)


def _normalised(text: str) -> str:
    decomposed = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(character for character in decomposed if not unicodedata.combining(character))
    plain = _APOSTROPHE.sub("", _POSSESSIVE.sub("", _THOUSANDS_COMMA.sub("", plain)))
    return " ".join(word for word in _WORD.findall(plain) if word not in _ARTICLES)


def _rows(path: Path | None, packaged: str) -> Iterator[tuple[str, int, Mapping[str, Any]]]:
    """Each row with its place (`file:line`) and its line."""
    source = resources.files("spanflow.demo") / "corpus" / packaged if path is None else Path(path)
    name = packaged if path is None else str(path)
    try:
        content = source.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise QueryError(
            f"{name}: cannot be read ({error.strerror}); pass the path of a JSON Lines file, "
            "or no path for the documents and questions that come with the package"
        ) from error
    except UnicodeDecodeError as error:
        raise QueryError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    empty = True
    # Not splitlines(): JSON text may hold other line separators, U+2028 for one.
    for line, written in enumerate(content.split("\n"), 1):
        if written.strip():
            empty = False
            where = f"{name}:{line}"
            yield where, line, _row(written, where)
    if empty:
        raise QueryError(f"{name}: holds no rows; write one JSON object a line")


def _row(written: str, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(written)
    except (ValueError, RecursionError) as error:
        raise QueryError(f"{where}: is not JSON ({error}); write one JSON object a line") from error
    if not isinstance(row, dict):
        raise QueryError(f"{where}: is a JSON {type(row).__name__}; write one JSON object a line")
    return row


def _text(row: Mapping[str, Any], key: str, where: str) -> str:
    if key not in row:
        raise QueryError(f"{where}: {key!r} is missing; the row has {', '.join(map(repr, row)) or 'no keys'}")
    return _checked(row[key], f"{where}: {key!r}")


def _answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    answers = row.get("answers")
    if not isinstance(answers, list) or not answers:
        raise QueryError(f"{where}: 'answers' must be a list of at least one text, for example [\"Ailsa Craig\"]")
    return tuple(_checked(answer, f"{where}: 'answers'[{index}]") for index, answer in enumerate(answers))


def _checked(value: object, where: str) -> str:
    check_text(value, where)
    text = str(value)
    if not text.strip():
        raise QueryError(f"{where}: is empty; write some text")
    return text


def _import_bm25s() -> Any:
    try:
        import bm25s
    except ImportError as error:
        raise EngineUnavailable(
            f"Bm25Retriever: the package bm25s cannot be imported ({error}); {install_advice('retrieval')}"
        ) from error
    return bm25s
