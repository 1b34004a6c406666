"""From the answers of a contestant, round by round, to what a row says of their times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TypeAlias

from benchmarks._engines import Answer
from benchmarks._measure import Spread, ratio_spread, spread
from benchmarks._report import Row, listed, seconds, times

Rounds: TypeAlias = Sequence[Sequence[Answer]]


def flat(rounds: Rounds) -> list[Answer]:
    """All answers in a row."""
    return [answer for answers in rounds for answer in answers]


def time_spread(rounds: Rounds) -> Spread:
    """Seconds to the first token, over all answers."""
    return spread([answer.ttft for answer in flat(rounds)])


def time_ratio(above: Rounds, below: Rounds) -> Spread:
    """How many times longer the answers of `above` took to their first token than those of `below`."""
    first, second = ([[answer.ttft for answer in answers] for answers in rounds] for rounds in (above, below))
    return ratio_spread(first, second)


def time_row(rounds: Rounds, stock: Rounds) -> Row:
    """Times to the first token, beside those of stock, and where the tokens of the prompts came from."""
    answers = flat(rounds)
    time, speedup = time_spread(rounds), time_ratio(stock, rounds)
    return {
        "prompt_tokens": median(answer.usage.prompt for answer in answers),
        "ttft": seconds(time),
        "ttft_median": time.median,
        "ttft_low": time.low,
        "ttft_high": time.high,
        "ttft_all": listed([answer.ttft for answer in answers]),
        "count": time.count,
        "speedup": times(speedup),
        "speedup_median": speedup.median,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
        "cached_tokens": median(answer.usage.cached for answer in answers),
        "internal_tokens": median(answer.usage.internal for answer in answers),
    }
