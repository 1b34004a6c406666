"""Statistics of repeated measurements. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the least and the largest of them, and how many they are."""

    median: float
    low: float
    high: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Median and range. Raises ValueError for no values."""
    if not values:
        raise ValueError("spread: there are no values; measure at least once")
    return Spread(median(values), min(values), max(values), len(values))


def ratio_spread(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Spread:
    """How many times larger the values of `above` are than those of `below`.

    Both are lists of rounds, and a round is a list of values: a ratio is taken in each round, between the medians of
    the two, so that what changes slowly on a machine touches both sides of a ratio. Rounds that lack a side are left
    out. Raises ValueError where none is left, or where the numbers of rounds differ.
    """
    if len(above) != len(below):
        raise ValueError(f"ratio_spread: {len(above)} rounds above, {len(below)} below; give both sides every round")
    return spread([median(a) / median(b) for a, b in zip(above, below, strict=True) if a and b])


def rotated_orders(items: Sequence[T], count: int, rng: random.Random) -> list[tuple[T, ...]]:
    """`count` orders of the items, each with another item in front, so that no two share a beginning.

    Raises ValueError for more orders than items.
    """
    if count > len(items):
        raise ValueError(f"rotated_orders: {count} orders of {len(items)} items can't all begin with another item")
    orders = []
    for first in rng.sample(range(len(items)), count):
        rest = [item for place, item in enumerate(items) if place != first]
        rng.shuffle(rest)
        orders.append((items[first], *rest))
    return orders


def total_variation(one: dict[int, float], other: dict[int, float]) -> float:
    """Half the sum of differences of two distributions, each given by the probabilities of its top tokens.

    What lies outside of the top counts as one more token.
    """
    one, other = one | {-1: max(0.0, 1 - sum(one.values()))}, other | {-1: max(0.0, 1 - sum(other.values()))}
    return sum(abs(one.get(token, 0.0) - other.get(token, 0.0)) for token in one.keys() | other.keys()) / 2


def rank_agreement(one: dict[int, float], other: dict[int, float]) -> float | None:
    """Kendall's tau over the tokens that both name: 1 for one order, -1 for the reverse; None for fewer than two."""
    shared = sorted(one.keys() & other.keys())
    pairs = [(a, b) for place, a in enumerate(shared) for b in shared[place + 1 :]]
    if not pairs:
        return None
    signs = [(one[a] - one[b]) * (other[a] - other[b]) for a, b in pairs]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(pairs)
