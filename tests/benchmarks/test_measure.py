"""Statistics of repeated measurements."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._budget import Budget
from benchmarks._measure import Spread, rank_agreement, ratio_spread, rotated_orders, spread, total_variation

TIMES = st.lists(st.floats(0.001, 100), min_size=1, max_size=9)
CHANCES = st.dictionaries(st.integers(0, 9), st.floats(0, 0.1), max_size=9)


@given(TIMES)
def test_the_median_lies_within_the_range(values: list[float]) -> None:
    found = spread(values)
    assert min(values) == found.low <= found.median <= found.high == max(values)
    assert found.count == len(values)


def test_nothing_has_no_spread() -> None:
    with pytest.raises(ValueError, match="no values; measure at least once"):
        spread([])


def test_a_ratio_is_taken_in_each_round() -> None:
    """A machine that is twice as slow in the second round changes no ratio."""
    found = ratio_spread([[4.0], [8.0]], [[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]])
    assert found == Spread(2.0, 2.0, 2.0, 2)


def test_rounds_without_one_side_do_not_count() -> None:
    assert ratio_spread([[4.0], [], [9.0]], [[2.0], [1.0], []]) == Spread(2.0, 2.0, 2.0, 1)
    with pytest.raises(ValueError, match="2 rounds above, 1 below"):
        ratio_spread([[1.0], [1.0]], [[1.0]])


@given(st.integers(1, 12), st.integers(0, 99), st.data())
def test_orders_begin_with_different_items(count: int, seed: int, data: st.DataObject) -> None:
    items = [f"d{number}" for number in range(count)]
    orders = rotated_orders(items, data.draw(st.integers(1, count)), random.Random(seed))
    assert all(sorted(order) == sorted(items) for order in orders)
    assert len({order[0] for order in orders}) == len(orders)


def test_more_orders_than_items_are_refused() -> None:
    with pytest.raises(ValueError, match="5 orders of 4 items"):
        rotated_orders("abcd", 5, random.Random(0))


@given(CHANCES, CHANCES)
def test_total_variation_is_a_distance(one: dict[int, float], other: dict[int, float]) -> None:
    assert total_variation(one, one) == 0
    assert total_variation(one, other) == pytest.approx(total_variation(other, one))
    assert -1e-9 <= total_variation(one, other) <= 1 + 1e-9


def test_total_variation_by_hand() -> None:
    assert total_variation({1: 0.5, 2: 0.5}, {3: 1.0}) == pytest.approx(1.0)
    assert total_variation({1: 0.6}, {1: 0.5}) == pytest.approx(0.1)  # what is not told is one token more


def test_rank_agreement_by_hand() -> None:
    one = {1: -0.1, 2: -1.0, 3: -2.0}
    assert rank_agreement(one, one) == 1
    assert rank_agreement(one, {1: -3.0, 2: -2.0, 3: -1.0}) == -1
    assert rank_agreement(one, {1: -0.1, 2: -2.0, 3: -1.0}) == pytest.approx(1 / 3)
    assert rank_agreement(one, {4: -1.0}) is None


class Clock:
    """Seconds that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_round_begins_only_if_it_will_end_in_time() -> None:
    clock = Clock()
    budget = Budget(100, clock=clock)
    assert budget.allows("1k")
    clock.now = 30
    budget.note("1k", 0)
    assert budget.allows("1k")
    assert budget.allows("2k"), "the first round of each name is always measured"
    clock.now = 71
    assert not budget.allows("1k")
    assert budget.elapsed == 71
    assert Budget(None, clock=clock).allows("1k")
    assert math.isclose(Budget(10, already=3, clock=clock).elapsed, 3)
