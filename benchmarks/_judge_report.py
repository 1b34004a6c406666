"""From what was measured of judges to rows, figures and notes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import mean, median

from benchmarks._answers import flat, time_ratio, time_row, time_spread
from benchmarks._judge import FULL, LEASED, RELEASED, REPAIR_16, STOCK, Candidates, Contestant, Record
from benchmarks._measure import Spread
from benchmarks._plot import Panel
from benchmarks._report import Row

COLUMNS = {
    "temperature": "temp.",
    "fanout": "fan-out",
    "contestant": "contestant",
    "prompt_tokens": "prompt",
    "ttft": "outer TTFT, s (range)",
    "speedup": "stock / this (range)",
    "count": "n",
    "cached_tokens": "cached",
    "internal_tokens": "internal",
    "same_pick": "same pick",
    "distance": "distance",
    "agreement": "rank agr.",
}
#: Contestants by the names that they have in figures.
FIGURES = {"outer": LEASED, "outer_repair16": REPAIR_16, "outer_released": RELEASED, "outer_exact": FULL}

Records = Mapping[float, Mapping[tuple[int, Contestant], Record]]


def label(temperature: float) -> str:
    """A temperature as it stands in the names of figures: 0.8 is t08."""
    return f"t{temperature:g}".replace(".", "")


def rows(records: Records, made: Mapping[float, Candidates]) -> list[Row]:
    """One row for each temperature, fan-out and contestant."""
    out: list[Row] = []
    for temperature, by_fanout in records.items():
        candidates = made[temperature]
        for (fanout, who), record in by_fanout.items():
            if not flat(record.outers):
                continue
            row = time_row(record.outers, by_fanout[fanout, STOCK].outers) | _quality(record)
            row["temperature"], row["fanout"], row["contestant"] = temperature, fanout, who.name
            row["candidate_tokens_low"], row["candidate_tokens_high"] = min(candidates.lengths), max(candidates.lengths)
            row["candidate_tokens"] = median(candidates.lengths)
            inner_seconds = candidates.seconds.get("stock" if who is STOCK else "ours")
            row["inner_seconds"] = median(inner_seconds) if inner_seconds else None
            out.append(row)
    return out


def _quality(record: Record) -> Row:
    if not record.same:
        return {}
    return {
        "same_pick": round(mean(record.same), 3),
        "distance": round(median(record.distances), 4),
        "agreement": round(median(record.agreements), 3) if record.agreements else None,
    }


def figures(records: Records) -> dict[str, float]:
    """Numbers by name: `outer_*` is stock's time over ours, by fan-out and temperature, and `outer_worst_*` the least
    of them over all fan-outs; `outer_exact_*`, against full attention on our engine, is about 1 where both compute on
    as many cores, as with `--cores same`, and else what the cores alone add to each factor; `same_pick_*` is the share
    of outer prompts with the first token of full attention."""
    found: dict[str, float] = {}
    for temperature, by_fanout in records.items():
        speedups: list[float] = []
        for name, who in FIGURES.items():
            for (fanout, other), record in by_fanout.items():
                if other is not who or not flat(record.outers):
                    continue
                ratio = time_ratio(by_fanout[fanout, STOCK].outers, record.outers).median
                found[f"{name}_{fanout}_{label(temperature)}"] = ratio
                if who is LEASED:
                    speedups.append(ratio)
        if speedups:
            found[f"outer_worst_{label(temperature)}"] = min(speedups)
        for name, who in (("same_pick", LEASED), ("same_pick_repair16", REPAIR_16)):
            same = [one for (_, other), record in by_fanout.items() if other is who for one in record.same]
            if same:
                found[f"{name}_{label(temperature)}"] = mean(same)
    return found


def notes(records: Records, made: Mapping[float, Candidates]) -> list[str]:
    """What to know about the rows: the candidates, and spans that were not in the cache."""
    found = [
        "every outer prompt is new to the cache but for its candidates, which the run checks; same pick: its first "
        "token is that of full attention over the same candidates; distance: total variation of the first token's "
        "distribution; rank agr.: Kendall's tau of its likeliest tokens"
    ]
    for temperature, candidates in made.items():
        if candidates.lengths:
            found.append(
                f"temperature {temperature:g}: candidates of {min(candidates.lengths)} to {max(candidates.lengths)} "
                f"tokens (median {median(candidates.lengths):.0f}); of those of a round at least "
                f"{min(candidates.distinct)} differ; {candidates.num_same} of {candidates.num} are the same on stock"
            )
        for (fanout, who), record in records[temperature].items():
            lost = sum(answer.num_lost for answer in flat(record.outers))
            wanted = sum(answer.num_wanted for answer in flat(record.outers))
            if lost and who is not RELEASED:
                found.append(
                    f"temperature {temperature:g}, fan-out {fanout}, {who.name}: {lost} of {wanted} candidates "
                    "were not in the cache; a larger --kv-gib keeps them"
                )
    return found


def panels(records: Records) -> list[Panel]:
    """TTFT against the number of candidates, one set of axes a temperature."""
    out = []
    for temperature, by_fanout in records.items():
        lines: dict[str, dict[int, Spread]] = {}
        for (fanout, who), record in by_fanout.items():
            if flat(record.outers):
                lines.setdefault(who.name, {})[fanout] = time_spread(record.outers)
        out.append(Panel(f"judge, temperature {temperature:g}", "candidates", lines))
    return out
