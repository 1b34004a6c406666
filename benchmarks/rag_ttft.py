"""Time to first token of retrieval prompts whose documents come in another order each time.

    python -m benchmarks.rag_ttft [--quick] [--json FILE] [--plot FILE.png]

Stock vLLM with prefix caching (documents shuffled, and in canonical order) against each rung of ours, with all
documents' KV in the cache (hit) and with none of it (miss), beside the answers that each gives: for prompts of several
lengths, each cut into several numbers of documents.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from benchmarks._budget import Budget
from benchmarks._documents import Document, build_documents, load_passages
from benchmarks._engines import Pair, say, started_pair
from benchmarks._machine import this_machine, versions
from benchmarks._options import check_plot, parser, positive
from benchmarks._plot import draw
from benchmarks._rag import (
    ALL,
    CLOSED_BOOK,
    DEFAULT,
    MOVED_HEADER,
    NAMED,
    QUICK,
    STOCK,
    TOP_TOKENS,
    Contestant,
    Point,
    Record,
    overhead_tokens,
    prompt_for,
    run_round,
)
from benchmarks._rag_report import COLUMNS, figures, notes, panels, rows
from benchmarks._report import Report, text_table

#: A document is not shorter.
MIN_TOKENS = 100
#: Each length with each number of documents that it has room for: about twenty minutes on two cores.
GRID = tuple(Point(t, d) for t in (1069, 2097, 4133) for d in (4, 8, 12) if t >= MIN_TOKENS * d)
QUICK_GRID = NAMED[:2]
QUICK_SECONDS = 100.0

Records = dict[Point, dict[Contestant, Record]]


def grid(text: str) -> tuple[Point, ...]:
    """Points from `1069/4,2097/8`, tokens of the prompt and number of documents, or from `1069,2097x4,8`: each length
    with each number."""
    lengths, cross, numbers = text.partition("x")
    parts = text.split(",")
    if cross:
        parts = [f"{tokens}/{documents}" for tokens in lengths.split(",") for documents in numbers.split(",")]
    points: list[Point] = []
    for part in parts:
        tokens, slash, documents = part.partition("/")
        point = Point(positive(tokens.strip()), positive(documents.strip())) if slash else None
        if point is None or point.num_documents < 2 or point.num_tokens < MIN_TOKENS * point.num_documents:
            raise argparse.ArgumentTypeError(
                f"{part!r}: expected TOKENS/DOCUMENTS with at least 2 documents of {MIN_TOKENS} tokens, such as "
                "1069/4, or several of both, such as 1069,2097x4,8"
            )
        if point in points:
            raise argparse.ArgumentTypeError(f"{part!r}: expected each point once")
        points.append(point)
    return tuple(points)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write what was asked for."""
    options = parser("rag_ttft", (__doc__ or "").partition("\n")[0], repeats=2)
    sizes = "TOKENS/DOCUMENTS,..., or TOKENS,...xDOCUMENTS,... for each with each"
    options.add_argument("--grid", type=grid, help=f"{sizes}; without it {','.join(map(str, GRID))}")
    options.add_argument("--documents", type=Path, metavar="PATH", help="JSON Lines (.gz) with title and text")
    options.add_argument("--hits", type=positive, default=3, help="hits measured for each miss")
    options.add_argument("--questions", type=positive, default=4, help="questions answered in a round, at most")
    options.add_argument("--kv-gib", type=float, default=1.0, help="KV cache of each engine")
    asyncio.run(_main(options.parse_args(arguments)))


async def _main(options: argparse.Namespace) -> None:
    check_plot(options.plot)
    budget = Budget(QUICK_SECONDS if options.quick else None)
    points: tuple[Point, ...] = options.grid or (QUICK_GRID if options.quick else GRID)
    who = QUICK if options.quick else ALL
    passages = load_passages(options.documents)
    sizes = {
        "grid": " ".join(map(str, points)),
        "rounds_at_most": options.repeats,
        "hits_per_round": options.hits,
        "documents": str(options.documents or "the package's corpus"),
        "pool": "twice a prompt's documents",
        "kv_gib": options.kv_gib,
        "cores": options.cores,
    }
    report = Report("rag_ttft", this_machine(), versions(), options.seed, sizes)
    print(report.heading(), flush=True)
    rng = random.Random(options.seed)
    window = max(p.num_tokens for p in points) * 5 // 4 + 256
    records: Records = {point: {one: Record() for one in (*who, CLOSED_BOOK)} for point in points}
    engine_options = {"max_model_len": window, "kv_cache_gib": options.kv_gib, "max_logprobs": TOP_TOKENS}
    async with started_pair(options.model, cores=options.cores, **engine_options) as pair:
        pools = {}
        for point in points:
            size = (point.num_tokens - overhead_tokens(pair.template)) // point.num_documents
            pools[point] = build_documents(
                passages, size, 2 * point.num_documents, lambda t: len(pair.template.pieces.encode_first(t)), rng
            )
        await _warm_up(pair, pools, options.quick)
        for number in range(options.repeats):
            for point in points:
                begun = budget.elapsed
                if not budget.allows(str(point)):
                    continue
                await run_round(
                    pair,
                    pools[point],
                    who if number % 2 == 0 else who[::-1],
                    records[point],
                    num_drawn=point.num_documents,
                    num_hits=options.hits,
                    num_questions=options.questions,
                    rng=rng,
                )
                budget.note(str(point), begun)
                say(f"{point}: round {number + 1} took {budget.elapsed - begun:.0f} s")
    report.rows, report.figures = rows(records), figures(records)
    report.notes = [*filter(None, [pair.note]), *notes(records)]
    print(text_table(COLUMNS, report.rows))
    print(report.footing())
    if options.json:
        report.write(options.json)
    if options.plot:
        draw(options.plot, f"{report.benchmark}: {report.machine.cpu}", panels(records))


async def _warm_up(pair: Pair, pools: dict[Point, list[Document]], quick: bool) -> None:
    """Run each kind of step once."""
    smallest = min(pools, key=lambda point: point.num_tokens)
    for who in (MOVED_HEADER, DEFAULT):
        for order in (pools[smallest][:2], pools[smallest][1::-1]):
            await pair.ask(pair.ours, prompt_for(pair.template, who, order, "Who was it?"), max_tokens=4)
    for point, pool in pools.items():
        prompt = prompt_for(pair.template, STOCK, pool[: point.num_documents], "Who was it?")
        if not quick or point is smallest:
            await pair.ask(pair.stock, prompt, max_tokens=2)
        if not quick:
            await pair.ask(pair.ours, prompt, max_tokens=2)


if __name__ == "__main__":
    main()
