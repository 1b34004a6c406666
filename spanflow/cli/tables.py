"""What demos and runs look like on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Answers round by round, a summary of the rounds, and how it was measured."""
    compares = any(row.stock is not None for row in report.rows)
    rounds = sorted({row.round for row in report.rows})
    parts: list[Any] = [_round_table(report, number) for number in rounds]
    parts += [_summary_table([report.summary(number) for number in rounds], report), _sentence(report, rounds[-1])]
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


def _round_table(report: RagReport, number: int) -> Any:
    from rich.markup import escape

    what = "the first time" if number == 1 else "the same questions, documents in another order"
    columns = ("way", "", "TTFT", "hit", "moved", "repaired", "computed", "question and answers")
    table = _table(f"Round {number}: {what}", columns, left=("way", "", "question and answers"))
    for row in report.rows:
        if row.round != number:
            continue
        table.add_row(*[""] * 7, f"[bold]{escape(row.question)}[/bold]")
        ours = row.spans
        counts = [_hits(ours), f"{ours.moved}", f"{ours.repaired}", _plus(ours)]
        table.add_row(report.rung, _mark(ours.is_correct), _seconds(ours.ttft), *counts, escape(ours.text))
        if row.stock is not None:
            stock = row.stock
            counts = ["", "", "", _plus(stock)]
            table.add_row("stock", _mark(stock.is_correct), _seconds(stock.ttft), *counts, escape(stock.text))
    return table


def _summary_table(summaries: Sequence[Summary], report: RagReport) -> Any:
    table = _table("Summary", ("round", "way", "right", "median TTFT", "spans hit", "tokens computed"), left=("way",))
    for summary in summaries:
        right = f"{summary.accuracy:.0%}"
        hit = "" if summary.share_hit is None else f"{summary.share_hit:.0%}"
        computed = f"{summary.num_computed:,}"
        table.add_row(str(summary.round), report.rung, right, _seconds(summary.ttft), hit, computed)
        if summary.stock_accuracy is not None and summary.stock_ttft is not None:
            right, computed = f"{summary.stock_accuracy:.0%}", f"{summary.stock_num_computed:,}"
            table.add_row("", "stock", right, _seconds(summary.stock_ttft), "", computed)
    return table


def _sentence(report: RagReport, last: int) -> str:
    """The last round, in which spans are there, in one sentence."""
    summary = report.summary(last)
    text = f"Round {last}, {summary.num_questions} questions over {report.num_documents} documents each: "
    text += "" if summary.share_hit is None else f"{summary.share_hit:.0%} of spans hit, "
    text += f"{summary.accuracy:.0%} right"
    if summary.stock_accuracy is None or summary.stock_ttft is None:
        return f"{text}, median TTFT {_seconds(summary.ttft)}."
    ratio = summary.stock_ttft / summary.ttft if summary.ttft else 0.0
    text += f" (stock: {summary.stock_accuracy:.0%}), median TTFT {_seconds(summary.ttft)} against "
    return f"{text}{_seconds(summary.stock_ttft)}: {ratio:.1f}x."


def _table(title: str, columns: Sequence[str], left: Sequence[str]) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
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
    ratio = report.stock_ttft / report.ttft if report.ttft else 0.0
    picks = [
        f"[bold]Picked with KV taken over:[/bold] {escape(first.pick)}",
        f"[bold]Picked with full attention:[/bold] {escape(report.stock[0].pick)}",
    ]
    lines = [
        f"Median TTFT of the judge: {_seconds(report.ttft)} against {_seconds(report.stock_ttft)}: {ratio:.1f}x, with "
        f"{report.num_candidates} candidates at temperature {report.temperature:g}."
    ]
    if report.spans_unsupported:
        lines.append(f"Spans ran with full attention: {report.spans_unsupported}.")
    return [candidates, *picks, runs, *lines]
