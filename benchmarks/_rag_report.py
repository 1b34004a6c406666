"""From what was measured of retrieval prompts to rows, figures and notes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import mean, median

from benchmarks._answers import Rounds, flat, time_ratio, time_row, time_spread
from benchmarks._measure import Spread, total_variation
from benchmarks._plot import Panel
from benchmarks._rag import (
    CLOSED_BOOK,
    DEFAULT,
    FULL,
    MOVED_HEAD,
    MOVED_HEADER,
    NUM_EARLIER,
    REPAIR_16,
    STOCK,
    Contestant,
    Point,
    Record,
    labels,
)
from benchmarks._report import Row

COLUMNS = {
    "point": "prompt",
    "contestant": "contestant",
    "cache": "documents",
    "ttft": "TTFT, s (range)",
    "speedup": "stock / this (range)",
    "count": "n",
    "cached_tokens": "cached",
    "internal_tokens": "internal",
    "move_share": "moves share",
    "likelihood": "log-lik.",
    "kept": "kept",
    "distance": "distance",
    "num_answers": "of",
}
#: Contestants by the names that they have in figures.
FIGURES = {"moved": MOVED_HEADER, "default": DEFAULT, "head": MOVED_HEAD, "repair16": REPAIR_16}

Records = Mapping[Point, Mapping[Contestant, Record]]


def rows(records: Records) -> list[Row]:
    """One row for each point, contestant and state of the cache; the questions alone stand last."""
    out: list[Row] = []
    names = labels(records)
    for point, by_contestant in records.items():
        stock, closed = by_contestant[STOCK], by_contestant[CLOSED_BOOK]
        for who, record in by_contestant.items():
            good = quality(record, stock, closed)
            known = "hit" if who.has_spans else "prefix, if any" if who.canonical else "recomputed"
            for cache, rounds in ((known, record.hits), ("new", record.misses), ("prefix hit", record.repeats)):
                if flat(rounds):
                    row = _row(point, rounds, stock) | good
                    row["label"], row["contestant"], row["cache"] = names[point], who.name, cache
                    row["move_share"] = move_share(record) if cache == "hit" else None
                    out.append(row)
            if not flat(record.hits) and good:
                good["contestant"], good["label"] = who.name, names[point]
                out.append(good)
    return out


def _row(point: Point, rounds: Rounds, stock: Record) -> Row:
    lengths = [answer.usage.prompt for answer in flat(rounds)]
    row: Row = {
        "point": f"{median(lengths):.0f} tokens, {point.num_documents} documents",
        "num_documents": point.num_documents,
        "prompt_tokens_low": min(lengths),
        "prompt_tokens_high": max(lengths),
    }
    return row | time_row(rounds, stock.hits)


def quality(record: Record, stock: Record, closed: Record) -> Row:
    """Log-likelihood per token of the accepted answers; the share of what documents add to it under full attention
    that is kept; how far the distribution of an answer's first token is from that of stock (total variation)."""
    mine = [value for values in record.likelihoods for value in values]
    if not mine:
        return {}
    theirs = mean(value for values in stock.likelihoods for value in values)
    alone = mean(value for values in closed.likelihoods for value in values)
    distances = [
        total_variation(a, b)
        for one, other in zip(record.firsts, stock.firsts, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return {
        "likelihood": round(mean(mine), 3),
        "kept": round((mean(mine) - alone) / (theirs - alone), 3) if theirs > alone else None,
        "distance": round(median(distances), 4),
        "num_answers": len(mine),
    }


def move_share(record: Record) -> float | None:
    """The share of a hit's time that the moves take; None where nothing was moved."""
    shares = [
        moves / mean(answer.ttft for answer in answers)
        for moves, answers in zip(record.move_seconds, record.hits, strict=False)
        if answers
    ]
    return round(median(shares), 3) if shares else None


def figures(records: Records) -> dict[str, float]:
    """Numbers by name: `hit_*` is stock's time over that of a hit, `miss_*` the time with all documents new
    over stock's, `moves_share_*` the share of a hit's time spent in moves, `kept_*` the share of what documents
    add, `exact_*` stock's time over that of the exact rung: about 1 where both compute on as many cores, as with
    `--cores same`, and else what the cores alone add to each factor against stock. `of_prefix_hit_*` is the time of an
    ordinary prefix hit, which needs no moves and can't be beaten, over that of a moved hit."""
    found: dict[str, float] = {}
    for point, label in labels(records).items():
        by_contestant = records[point]
        stock, closed = by_contestant[STOCK], by_contestant[CLOSED_BOOK]
        for name, who in FIGURES.items():
            record = by_contestant.get(who)
            if record is None or not flat(record.hits):
                continue
            suffix = label if who is MOVED_HEADER else f"{label}_{name}"
            found[f"hit_{label}_{name}"] = time_ratio(stock.hits, record.hits).median
            found[f"miss_{suffix}"] = time_ratio(record.misses, stock.hits).median
            share, kept = move_share(record), quality(record, stock, closed).get("kept")
            if share is not None:
                found[f"moves_share_{suffix}"] = share
            if isinstance(kept, float):
                found[f"kept_{label}_{name}"] = kept
        if FULL in by_contestant and flat(by_contestant[FULL].hits):
            full = by_contestant[FULL]
            found[f"exact_{label}"] = time_ratio(stock.hits, full.hits).median
            moved = by_contestant.get(MOVED_HEADER)
            if moved is not None and flat(moved.hits) and flat(full.repeats):
                found[f"of_prefix_hit_{label}"] = time_ratio(full.repeats, moved.hits).median
    return found


def notes(records: Records) -> list[str]:
    """What to know about the rows, such as spans of hits that were not in the cache after all."""
    found = [
        "stock: with its documents shuffled; the exact rung computes the same tokens on our engine",
        "hit: all documents' KV is in the cache, their order is new; recomputed and new: no document is, which the run "
        f"checks; prefix hit: the documents in the order of the prompt before; canonical order: behind {NUM_EARLIER} "
        "prompts over other documents of the pool",
        "log-lik.: per token of the accepted answers; kept: the share of what the documents add to it under stock's "
        "full attention; distance: between the distributions of the first token of this answer and of "
        "stock's (total variation), median",
    ]
    names = labels(records)
    if any(name != point.label for point, name in names.items()):
        named = ", ".join(f"{name} is {point}" for point, name in names.items())
        found.append(f"in the names of figures {named} (tokens/documents)")
    for point, by_contestant in records.items():
        for who, record in by_contestant.items():
            lost = sum(answer.num_lost for answer in flat(record.hits))
            wanted = sum(answer.num_wanted for answer in flat(record.hits))
            if lost:
                found.append(
                    f"{names[point]}, {who.name}: {lost} of {wanted} spans of hits were not in the cache; "
                    "a larger --kv-gib keeps them"
                )
    return found


def panels(records: Records) -> list[Panel]:
    """TTFT against the length of the prompt; where a length repeats, against documents, one set of axes a length."""
    lengths = Counter(point.num_tokens for point in records)
    if len(lengths) == len(records):
        by_length = {point.num_tokens: by_contestant for point, by_contestant in records.items()}
        return [Panel("retrieval, documents in a new order", "tokens of the prompt, about", _lines(by_length))]
    return [
        Panel(
            f"retrieval, about {length} tokens",
            "documents, in a new order",
            _lines({point.num_documents: records[point] for point in records if point.num_tokens == length}),
        )
        for length in sorted(lengths)
    ]


def _lines(by_size: Mapping[int, Mapping[Contestant, Record]]) -> dict[str, dict[int, Spread]]:
    """A line for each contestant and state of the cache, from a size to its times."""
    lines: dict[str, dict[int, Spread]] = {}
    for size, by_contestant in by_size.items():
        for who, record in by_contestant.items():
            known = f"{who.name}, hit" if who.has_spans else who.name
            for name, rounds in (
                (known, record.hits),
                (f"{who.name}, new", record.misses),
                (f"{who.name}, prefix hit", record.repeats),
            ):
                if flat(rounds):
                    lines.setdefault(name, {})[size] = time_spread(rounds)
    return lines
