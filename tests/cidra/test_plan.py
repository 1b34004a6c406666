"""Plans of moves do what reading all and then writing all does, wave by wave, in bounded scratch."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanflow.cidra.moves import Moves, joined
from spanflow.cidra.plan import Plan, plan_moves
from spanflow.cidra.reference import at_once, in_waves

SCRATCH = 100_000_000


def check(rows: list[tuple[int, int, int, int]], scratch_tokens: int) -> Plan:
    """The plan, once it is known to be right and to keep to its scratch."""
    moves = Moves.of(rows)
    plan = plan_moves(moves, SCRATCH, scratch_tokens)
    held = in_waves(plan)
    used = {slot for slot in held if slot >= SCRATCH}
    wanted = {slot: value for slot, value in at_once(moves).items() if value != (slot, 0)}
    assert {slot: value for slot, value in held.items() if slot < SCRATCH} == wanted
    assert used == set(range(SCRATCH, SCRATCH + plan.num_scratch))
    assert plan.num_scratch <= scratch_tokens
    return plan


def num_copied(plan: Plan) -> int:
    """Tokens copied, those into scratch included."""
    return sum(wave.num_tokens for wave in plan.waves)


@st.composite
def some_moves(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Ranges whose targets do not overlap; their sources may lie anywhere."""
    rows, target = [], 0
    for _ in range(draw(st.integers(0, 12))):
        target += draw(st.integers(0, 6))
        count = draw(st.integers(0, 12))
        near = st.integers(-15, 15).map(lambda distance, target=target: max(0, target + distance))
        source = draw(st.one_of(near, st.just(target), st.integers(0, 120)))
        rows.append((source, target, count, draw(st.integers(-2, 2))))
        target += count
    return draw(st.permutations(rows))


@given(some_moves(), st.integers(1, 40))
def test_any_moves(rows: list[tuple[int, int, int, int]], scratch_tokens: int) -> None:
    check(rows, scratch_tokens)


@given(st.data(), st.integers(1, 12))
def test_any_function_on_slots(data: st.DataObject, scratch_tokens: int) -> None:
    """Each slot takes any slot's contents: every forest and every set of cycles can come up."""
    num_slots = data.draw(st.integers(1, 24))
    sources = data.draw(st.lists(st.integers(0, num_slots - 1), min_size=num_slots, max_size=num_slots))
    check([(source, target, 1, target % 3) for target, source in enumerate(sources)], scratch_tokens)


@given(st.permutations(range(12)), st.integers(1, 8), st.integers(0, 8), st.integers(1, 100))
def test_any_permutation_of_blocks(order: list[int], size: int, base: int, scratch_tokens: int) -> None:
    check([(base + s * size, base + t * size, size, t % 2) for t, s in enumerate(order)], scratch_tokens)


@given(st.permutations(range(20)), st.integers(1, 30))
def test_any_permutation(order: list[int], scratch_tokens: int) -> None:
    check([(source, target, 1, 0) for target, source in enumerate(order)], scratch_tokens)


def test_moves_that_do_not_meet_are_one_wave_as_they_are() -> None:
    rows = [(0, 1000, 10, 5), (100, 2000, 20, -5), (100, 3000, 20, 7), (7, 4000, 1, 0)]
    plan = check(rows, 0)
    assert [wave.rows() for wave in plan.waves] == [rows]


def test_nothing_is_planned_for_nothing() -> None:
    assert check([], 0).waves == ()
    assert check([(5, 5, 10, 0), (0, 3, 0, 1)], 0).waves == ()


def test_neighbours_that_continue_each_other_are_one_move() -> None:
    plan = check([(0, 100, 10, 5), (10, 110, 10, 5), (20, 120, 10, 6), (40, 130, 10, 6)], 0)
    assert plan.waves[0].rows() == [(0, 100, 20, 5), (20, 120, 10, 6), (40, 130, 10, 6)]
    assert joined([]).rows() == []


def test_a_target_waits_for_all_who_read_it() -> None:
    plan = check([(0, 10, 10, 1), (10, 20, 10, 1), (10, 30, 10, 2)], 0)
    assert [wave.rows() for wave in plan.waves] == [[(10, 20, 10, 1), (10, 30, 10, 2)], [(0, 10, 10, 1)]]


def test_two_spans_that_trade_places() -> None:
    plan = check([(0, 100, 50, 100), (100, 0, 50, -100)], 50)
    assert plan.num_scratch == 50
    assert num_copied(plan) == 150
    assert len(plan.waves) == 3


@pytest.mark.parametrize("length", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("scratch_tokens", [1, 3, 1000])
def test_cycles_of_any_length(length: int, scratch_tokens: int) -> None:
    rows = [(10 * i, 10 * ((i + 1) % length), 4, 3 + i) for i in range(length)]
    plan = check(rows, scratch_tokens)
    if scratch_tokens == 1000:
        assert len(plan.waves) <= 3


@pytest.mark.parametrize("distance", [1, 3, 32, 33, 255])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_span_shifted_inside_its_own_blocks_takes_two_waves(distance: int, sign: int) -> None:
    plan = check([(1000, 1000 + sign * distance, 256, sign * distance)], 256)
    assert len(plan.waves) == 2
    # With less scratch there are more waves, not other results.
    less = check([(1000, 1000 + sign * distance, 256, sign * distance)], 32)
    assert less.num_scratch <= 32
    assert len(less.waves) <= 2 * (256 // 32 + 1)
    assert num_copied(check([(1000, 1000 + sign * distance, 256, sign * distance)], 0)) == 256


def test_a_span_turned_in_place_goes_through_scratch() -> None:
    plan = check([(64, 64, 32, 9), (64, 200, 32, 3)], 32)
    assert [wave.rows() for wave in plan.waves] == [
        [(64, SCRATCH, 32, 0)],
        [(SCRATCH, 64, 32, 9), (SCRATCH, 200, 32, 3)],
    ]


def test_keys_are_rotated_on_their_last_way() -> None:
    plan = check([(0, 3, 100, 3)], 100)
    saved, written = plan.waves
    assert not saved.delta.any()
    assert (written.delta == 3).all()


@pytest.mark.parametrize(
    ("rows", "scratch", "words"),
    [
        ([(0, 10, 5, 0), (20, 14, 5, 0)], 9, "two moves write slot 14; a slot has one source"),
        (
            [(0, 10, 5, 0), (50, SCRATCH - 1, 2, 0)],
            9,
            "move 1 writes slots 99999999 to 100000000, which meet the scratch",
        ),
        ([(SCRATCH + 8, 10, 5, 0)], 9, "move 0 reads slots 100000008 to 100000012, which meet the scratch of 9 slots"),
        ([(-1, 10, 5, 0)], 9, "a move has a slot or a length of -1"),
        ([(3, 10, -5, 0)], 9, "a move has a slot or a length of -5"),
        ([(0, 10, 5, 0), (10, 0, 5, 0)], 0, "5 tokens trade places in cycles; that takes at least one slot of scratch"),
    ],
)
def test_what_can_not_be_planned(rows: list[tuple[int, int, int, int]], scratch: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plan_moves(Moves.of(rows), SCRATCH, scratch)


def test_plans_of_many_moves_are_quick() -> None:
    """A hundred thousand moves of a block each, some of which wait for others: far below a second."""
    rng = random.Random(1)
    blocks = list(range(200_000))
    rng.shuffle(blocks)
    source, target = np.array(blocks[:100_000]) * 32, np.array(blocks[100_000:]) * 32
    source[:2_500], target[2_500:5_000] = target[2_500:5_000].copy(), source[:2_500].copy()
    moves = Moves(source, target, np.full(100_000, 32), np.arange(100_000) % 500)
    begun = time.perf_counter()
    plan = plan_moves(moves, SCRATCH, 1 << 20)
    assert time.perf_counter() - begun < 5
    assert sum(map(len, plan.waves)) >= 100_000
