"""The retrieval demo: questions over documents that come in another order each time, with spans and without."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from spanflow.api.combinators import commute, generate, seq, system, user
from spanflow.demo.corpus import Bm25Retriever, Question, is_correct, load_questions
from spanflow.ir.fidelity import DEFAULT_RUNG, Rung
from spanflow.ir.nodes import DEFAULT_SEPARATOR, Fragment, Generate
from spanflow.ir.ranges import check_count
from spanflow.result import Result, SpanResult
from spanflow.session import Session

#: Rounds of a demo: in the first all spans are new but those that questions share, in the second they are there.
NUM_ROUNDS = 2
MAX_TOKENS = 32

_SYSTEM = "Answer the question with a few words from the documents."


@dataclass(frozen=True, slots=True)
class Answered:
    """One answer under one rung. Tokens: of the prompt, and of its spans; `internal` beside it. Seconds: `ttft`.

    `reports` are those of the spans, one for each document in their order; full attention has none.
    `num_spans` counts those of which something is moved; one that is repaired whole can't be a hit.
    """

    text: str
    is_correct: bool
    ttft: float
    num_tokens: int
    num_spans: int
    num_hit: int
    moved: int
    repaired: int
    computed: int
    internal: int
    reports: tuple[SpanResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"reports": [report.to_dict() for report in self.reports]}


@dataclass(frozen=True, slots=True)
class Row:
    """One question in one round, with spans and, where they are compared, as a stock server answers it.

    `documents` are the ids of those that were given, in their order.
    """

    round: int
    question: str
    answers: tuple[str, ...]
    documents: tuple[str, ...]
    spans: Answered
    stock: Answered | None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"spans": self.spans.to_dict(), "stock": self.stock and self.stock.to_dict()}


@dataclass(frozen=True, slots=True)
class Summary:
    """A round, or all of them (`round` 0). Accuracies are shares of the questions, times medians in seconds.

    `share_hit` is None where nothing of any span is moved.
    """

    round: int
    num_questions: int
    accuracy: float
    ttft: float
    share_hit: float | None
    num_computed: int
    stock_accuracy: float | None
    stock_ttft: float | None
    stock_num_computed: int | None


@dataclass(frozen=True, slots=True)
class RagReport:
    """All rows, with what they were run with."""

    rows: tuple[Row, ...]
    rung: str
    num_documents: int
    seed: int
    engine: str
    model: str
    spans_unsupported: str
    versions: dict[str, str]

    def summary(self, number: int = 0) -> Summary:
        """The summary of a round, counted from 1; of all rounds for 0."""
        rows = [row for row in self.rows if number in (0, row.round)]
        ours = [row.spans for row in rows]
        stock = [row.stock for row in rows if row.stock is not None]
        num_spans = sum(answered.num_spans for answered in ours)
        return Summary(
            round=number,
            num_questions=len(rows),
            accuracy=_share(answered.is_correct for answered in ours),
            ttft=median(answered.ttft for answered in ours),
            share_hit=sum(answered.num_hit for answered in ours) / num_spans if num_spans else None,
            num_computed=sum(answered.computed + answered.internal for answered in ours),
            stock_accuracy=_share(answered.is_correct for answered in stock) if stock else None,
            stock_ttft=median(answered.ttft for answered in stock) if stock else None,
            stock_num_computed=sum(answered.computed for answered in stock) if stock else None,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        rounds = sorted({row.round for row in self.rows})
        return asdict(self) | {
            "rows": [row.to_dict() for row in self.rows],
            "rounds": [asdict(self.summary(number)) for number in rounds],
            "summary": asdict(self.summary()),
        }


def rag_query(question: str, documents: Sequence[Fragment]) -> Generate:
    """The query of one question: the documents commute."""
    return generate(seq(system(_SYSTEM), user(commute(*documents), _ask(question))), max_tokens=MAX_TOKENS)


def stock_query(question: str, documents: Sequence[Fragment]) -> Generate:
    """The same text with nothing said about order, as any server is asked it."""
    texts = [f"{document.text}{DEFAULT_SEPARATOR}" for document in documents]
    return generate(seq(system(_SYSTEM), user(*texts, _ask(question))), max_tokens=MAX_TOKENS)


def _ask(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def run_rag(
    session: Session,
    *,
    num_questions: int = 8,
    num_documents: int = 4,
    rung: Rung | str | None = None,
    compare: bool = True,
    seed: int = 0,
    on_row: Callable[[Row], None] = lambda row: None,
) -> RagReport:
    """Ask questions in two rounds, each time with their documents in a new order.

    Where it compares, each question is asked with spans and as a stock server is asked it (full attention and prefix
    caching, on the same engine), one after the other, with the same order of documents; which of the two comes first
    alternates. One question more is asked both ways before, so that neither pays for the engine's first steps.
    Raises QueryError for numbers, and what a session raises.
    """
    questions = load_questions()
    check_count(num_questions, "num_questions", 1, len(questions) - 1)
    check_count(num_documents, "num_documents", 1)
    retriever = Bm25Retriever()
    dice = random.Random(seed)
    first, *chosen = dice.sample(questions, num_questions + 1)
    retrieved = {question: retriever.retrieve(question.question, num_documents) for question in (first, *chosen)}
    ways = (rag_query, stock_query) if compare else (rag_query,)
    for way in ways:
        result = session.run(way(first.question, retrieved[first]), rung=rung)
        if way is rag_query:
            session.say(f"a first question, not counted: {first.question} {result.text.strip()}")
    rows = []
    for number in range(1, NUM_ROUNDS + 1):
        for place, question in enumerate(chosen):
            documents = dice.sample(retrieved[question], len(retrieved[question]))
            in_turn = ways if (place + number) % 2 else ways[::-1]
            found = {
                way: _answered(session.run(way(question.question, documents), rung=rung), question) for way in in_turn
            }
            ids = tuple(document.id or "" for document in documents)
            row = Row(number, question.question, question.answers, ids, found[rag_query], found.get(stock_query))
            rows.append(row)
            on_row(row)
    info = session.info
    return RagReport(
        tuple(rows),
        str(rung or session.options.rung or DEFAULT_RUNG),
        num_documents,
        seed,
        info.name,
        info.model,
        info.spans_unsupported,
        dict(info.versions),
    )


def _answered(result: Result, question: Question) -> Answered:
    usage, spans = result.usage, result.spans
    wanted = [span.status for span in spans if span.status != "computed"]
    return Answered(
        text=result.text.strip(),
        is_correct=is_correct(result.text, question.answers),
        ttft=result.ttft,
        num_tokens=usage.prompt,
        num_spans=len(wanted),
        num_hit=wanted.count("hit"),
        moved=sum(span.moved for span in spans),
        repaired=sum(span.repaired for span in spans),
        computed=usage.prompt - usage.cached,
        internal=usage.internal,
        reports=spans,
    )


def _share(values: Iterable[bool]) -> float:
    found = list(values)
    return sum(found) / len(found)
