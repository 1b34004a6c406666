"""What demos and runs look like on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanflow.demo.judge import Judged, JudgeReport
    from spanflow.demo.rag import Answered, RagReport, Row, Summary
    from spanflow.result import Result

#: Answers from which on a share of right ones means something.
_MANY = 100


def describe_result(result: Result) -> str:
    """One line about what a run took."""
    usage = result.total_usage
    spans = result.spans
    line = f"{usage.prompt} prompt tokens ({usage.cached} cached), {usage.completion} sampled, "
    line += f"first token of the answer after {result.ttft:.3f} s, all after {result.elapsed:.3f} s"
    if spans:
        statuses = ", ".join(
            f"{sum(span.status == status for span in spans)} {status}"
            for status in dict.fromkeys(span.status for span in spans)
        )
        line += f"; spans: {statuses}"
    if result.failures:
        line += f"; {len(result.failures)} generations failed and were dropped"
    return line


def describe_row(row: Row) -> str:
    """One line about a question that was answered."""
    stock = "" if row.stock is None else f", stock {row.stock.ttft:.2f} s"
    return f"round {row.round}: {row.question}  spans {row.spans.ttft:.2f} s{stock}"


def describe_judged(way: str, judged: Judged) -> str:
    """One line about a judge that ran."""
    return f"{way}: {len(judged.candidates)} candidates, judge's first token after {judged.ttft:.3f} s"


def rag_tables(report: RagReport) -> list[Any]:
    """All answers, with the totals at the end of their table, and how it was measured."""
    compares = any(row.stock is not None for row in report.rows)
    parts: list[Any] = [_rag_table(report, compares=compares)]
    if report.spans_unsupported:
        parts.append(f"Spans ran with full attention: {report.spans_unsupported}.")
    if report.summary().num_questions < _MANY:
        parts.append("So few answers say little about accuracy: more of them with --questions.")
    if compares:
        parts.append(
            "stock is the same text with full attention and prefix caching, on the same engine. Each question was "
            "asked both ways, one after the other, with one order of documents; which way came first alternated."
        )
    return parts


def _rag_table(report: RagReport, *, compares: bool) -> Any:
    from rich.markup import escape

    text = "question and answers"
    columns = ("way", "documents", "right", "TTFT", "ratio" if compares else "", "computed", text)
    title = f"{report.summary(1).num_questions} questions over {report.num_documents} documents each"
    table = _table(title, columns, left=("way", "documents", text))
    rounds = sorted({row.round for row in report.rows})
    for number in rounds:
        what = "the first time" if number == 1 else "the same questions, documents in another order"
        _add_heading(table, f"Round {number}: {what}")
        for row in report.rows:
            if row.round == number:
                _add_heading(table, escape(row.question))
                for cells in _row_cells(report.rung, row):
                    table.add_row(*cells)
        table.add_section()
    for number in (*rounds, 0):
        for cells in _total_cells(report.rung, report.summary(number)):
            table.add_row(*cells)
    return table


def _add_heading(table: Any, text: str) -> None:
    table.add_row(*[""] * (len(table.columns) - 1), f"[bold]{text}[/bold]")


def _row_cells(rung: str, row: Row) -> Iterator[list[str]]:
    """The line of the answer with spans, and that of stock below it."""
    from rich.markup import escape

    ratio = "" if row.stock is None else _ratio(row.stock.ttft, row.spans.ttft)
    for way, answered, times in ((rung, row.spans, ratio), ("stock", row.stock, "")):
        if answered is not None:
            statuses = " ".join(report.status for report in answered.reports)
            cells = [way, statuses, _mark(answered.is_correct), _seconds(answered.ttft), times, _plus(answered)]
            yield [*cells, escape(" ".join(answered.text.split()))]


def _total_cells(rung: str, summary: Summary) -> Iterator[list[str]]:
    """The lines of a round, or of all: the share of right answers, the median time, the sum of tokens."""
    what = f"Round {summary.round}" if summary.round else "All rounds"
    hit = "" if summary.share_hit is None else f"{summary.share_hit:.0%} hit"
    ratio = "" if summary.stock_ttft is None else _ratio(summary.stock_ttft, summary.ttft)
    cells = [rung, hit, f"{summary.accuracy:.0%}", _seconds(summary.ttft), ratio, f"{summary.num_computed:,}"]
    yield [*cells, f"[bold]{what}[/bold]: {summary.num_questions} answers, median TTFT"]
    if summary.stock_accuracy is not None and summary.stock_ttft is not None:
        right, computed = f"{summary.stock_accuracy:.0%}", f"{summary.stock_num_computed:,}"
        yield ["stock", "", right, _seconds(summary.stock_ttft), "", computed]


def _ratio(stock: float, seconds: float) -> str:
    """How many times as fast as stock."""
    return f"{stock / seconds if seconds else 0.0:.1f}x"


def _table(title: str, columns: Sequence[str], left: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in left)
    return table


def _hits(counts: Answered | Judged) -> str:
    return f"{counts.num_hit}/{counts.num_spans}" if counts.num_spans else ""


def _plus(counts: Answered | Judged) -> str:
    return f"{counts.computed}" + (f"+{counts.internal}" if counts.internal else "")


def _seconds(value: float) -> str:
    return f"{value:.3f}s"


def _mark(is_correct: bool) -> str:
    return "✓" if is_correct else "✗"


def judge_tables(report: JudgeReport) -> list[Any]:
    """Candidates and pick of the first repeat, all repeats, and the summary."""
    from rich.markup import escape

    first = report.spans[0]
    candidates = _table(f"Candidates (seed {first.seed})", ("", "text"), left=("text",))
    for number, text in enumerate(first.candidates, 1):
        candidates.add_row(str(number), escape(text))
    columns = ("way", "seed", "tokens", "hit", "moved", "computed", "TTFT", "all")
    runs = _table("The judge's prompt", columns, left=("way",))
    for way, judged_runs in (("taken over", report.spans), ("stock", report.stock)):
        for judged in judged_runs:
            moved = str(judged.moved) if judged.num_spans else ""
            cells = [way, str(judged.seed), str(judged.num_tokens), _hits(judged), moved, _plus(judged)]
            runs.add_row(*cells, _seconds(judged.ttft), _seconds(judged.elapsed))
    ratio = _ratio(report.stock_ttft, report.ttft)
    picks = [
        f"[bold]Picked with KV taken over:[/bold] {escape(first.pick)}",
        f"[bold]Picked with full attention:[/bold] {escape(report.stock[0].pick)}",
    ]
    lines = [
        f"Median TTFT of the judge: {_seconds(report.ttft)} against {_seconds(report.stock_ttft)}: {ratio}, with "
        f"{report.num_candidates} candidates at temperature {report.temperature:g}. Stock is the same text with full "
        "attention and prefix caching, on the same engine."
    ]
    if report.spans_unsupported:
        lines.append(f"Spans ran with full attention: {report.spans_unsupported}.")
    return [candidates, *picks, runs, *lines]
