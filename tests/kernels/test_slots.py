"""Batches are cut where a block ends on either side, and what is cut is what was asked for, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanflow.kernels.slots import Move, Slots, cut

Token = tuple[int, int, int]


def tokens(slots: Slots) -> list[Token]:
    """(source, target, delta) each."""
    arrays = (slots.source, slots.target, slots.count, slots.delta)
    rows = zip(*(array.tolist() for array in arrays), strict=True)
    return [(source + i, target + i, delta) for source, target, count, delta in rows for i in range(count)]


@st.composite
def some_slots(draw: st.DrawFn) -> Slots:
    rows = draw(
        st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(0, 30), st.integers(-2, 2)), max_size=8)
    )
    return Slots(*np.array(rows, np.int64).reshape(-1, 4).T)


@given(some_slots(), st.integers(1, 9))
def test_pieces_are_the_tokens_in_their_order(slots: Slots, block_size: int) -> None:
    pieces = cut(slots, block_size, 100)
    assert pieces.num_tokens == sum(slots.count)
    found: list[Token] = []
    for source, target, source_offset, target_offset, count, table in pieces.pieces.tolist():
        assert count > 0
        assert max(source_offset, target_offset) + count <= block_size
        delta = int(pieces.deltas[table]) if table >= 0 else 0
        begins = source * block_size + source_offset, target * block_size + target_offset
        found += [(begins[0] + i, begins[1] + i, delta) for i in range(count)]
    assert found == tokens(slots)
    assert 0 not in pieces.deltas


@given(some_slots(), st.integers(1, 9))
def test_chunks_are_neighbours_in_one_block_by_one_angle(slots: Slots, block_size: int) -> None:
    pieces = cut(slots, block_size, 100)
    chunk = np.repeat(np.arange(len(pieces.chunks) - 1), np.diff(pieces.chunks))
    assert len(chunk) == len(pieces)
    rows = pieces.pieces.tolist()
    for at in range(1, len(rows)):
        before, row = rows[at - 1], rows[at]
        goes_on = before[1] == row[1] and before[3] + before[4] == row[3] and before[5] == row[5]
        assert goes_on == (chunk[at] == chunk[at - 1])


@given(st.data(), st.integers(1, 9))
def test_moves_between_rows_of_blocks(data: st.DataObject, block_size: int) -> None:
    moves, wanted = [], []
    for _ in range(data.draw(st.integers(0, 4))):
        sides = [tuple(data.draw(st.permutations(range(12)))[: data.draw(st.integers(1, 6))]) for _ in range(2)]
        offsets = [data.draw(st.integers(0, block_size - 1)) for _ in range(2)]
        room = min(len(side) * block_size - offset for side, offset in zip(sides, offsets, strict=True))
        count, delta = data.draw(st.integers(0, room)), data.draw(st.integers(-3, 3))
        moves.append(Move(sides[0], offsets[0], sides[1], offsets[1], count, delta))
        for i in range(count):
            ends = [divmod(offset + i, block_size) for offset in offsets]
            slots = [side[block] * block_size + at for side, (block, at) in zip(sides, ends, strict=True)]
            wanted.append((slots[0], slots[1], delta))
    assert tokens(Slots.of(moves, block_size)) == wanted


def test_what_leaves_the_blocks_is_refused() -> None:
    def slots(source: int, target: int, count: int) -> Slots:
        return Slots(*np.array([[0, source], [50, target], [1, count], [0, 0]], np.int64))

    cut(slots(76, 0, 4), 8, 10)
    for bad, words in (
        (slots(77, 0, 4), "move 1 reads slots 77 to 80; there are 0 to 79"),
        (slots(0, -1, 2), "move 1 writes slots -1 to 0"),
        (slots(5, 0, -2), "move 1 reads slots 5 to 2"),
    ):
        with pytest.raises(IndexError, match=words):
            cut(bad, 8, 10)
    with pytest.raises(IndexError, match="a move of 9 tokens from offset 0 on does not fit 1 blocks of 8"):
        Slots.of([Move((1,), 0, (2, 3), 0, 9, 0)], 8)
