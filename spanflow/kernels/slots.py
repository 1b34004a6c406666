"""Moves as ranges of slots, cut into the pieces that kernels take: tokens of one block on either side.

A slot is the place of one token, `block * block_size + offset`; the slots behind the pool's are those of scratch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Move:
    """`num_tokens` tokens from `source_blocks` (the first token at `source_offset` in the first of them) to
    `target_blocks`, their keys rotated by `delta` positions."""

    source_blocks: tuple[int, ...]
    source_offset: int
    target_blocks: tuple[int, ...]
    target_offset: int
    num_tokens: int
    delta: int


class SlotMoves(Protocol):
    """`count[i]` tokens from slot `source[i]` on go to slot `target[i]` on, their keys rotated by `delta[i]` positions.

    Four arrays `[num_moves]`. No move may read or write what another one writes, or what it writes itself: a wave of
    a plan is such a batch.
    """

    @property
    def source(self) -> Ints: ...  # noqa: D102
    @property
    def target(self) -> Ints: ...  # noqa: D102
    @property
    def count(self) -> Ints: ...  # noqa: D102
    @property
    def delta(self) -> Ints: ...  # noqa: D102


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The plainest SlotMoves."""

    source: Ints
    target: Ints
    count: Ints
    delta: Ints

    @classmethod
    def of(cls, moves: Sequence[Move], block_size: int) -> Slots:
        """Moves between rows of blocks, one range for each pair of a source's and a target's block.

        Raises IndexError where a move has more tokens than its blocks hold.
        """
        rows = [
            (move.source_offset, move.target_offset, move.num_tokens, move.delta, len(source), len(target))
            for move in moves
            for source, target in ((move.source_blocks, move.target_blocks),)
        ]
        if not rows:
            return cls(*np.empty((4, 0), np.int64))
        at_source, at_target, count, delta, *held = np.array(rows, np.int64).T
        for offset, blocks in ((at_source, held[0]), (at_target, held[1])):
            bad = (offset < 0) | (offset >= block_size) | (count < 0) | (count > blocks * block_size - offset)
            if bad.any():
                at = int(np.flatnonzero(bad)[0])
                raise IndexError(
                    f"a move of {count[at]} tokens from offset {offset[at]} on does not fit {blocks[at]} blocks of "
                    f"{block_size}"
                )
        sides = [
            np.array([block for move in moves for block in move.source_blocks], np.int64),
            np.array([block for move in moves for block in move.target_blocks], np.int64),
        ]
        # As if each move's blocks stood in a row, behind those of the moves before it; then block by block.
        first = [np.cumsum(blocks) - blocks for blocks in held]
        placed = cls(first[0] * block_size + at_source, first[1] * block_size + at_target, count, delta)
        cut = _cut(_cut(placed, block_size, 1), block_size, 0)
        source, target = (
            blocks[slot // block_size] * block_size + slot % block_size
            for blocks, slot in zip(sides, (cut.source, cut.target), strict=True)
        )
        return cls(source, target, cut.count, cut.delta)


_FIELDS = ("source", "target", "source_offset", "target_offset", "count", "table")
#: One row per piece, as core/rerope.h has it; `table` is the index of the piece's delta among those of the batch, or
#: -1 for none.
PIECE = np.dtype([(name, np.int32) for name in _FIELDS])


@dataclass(frozen=True, slots=True)
class Pieces:
    """A batch, cut: `pieces` of dtype PIECE; `deltas` are the angles that they name, `[num_tables]`; `chunks`
    `[num_chunks + 1]` is where runs of pieces begin that are neighbours in one target block and have one angle."""

    pieces: NDArray[np.void]
    deltas: Ints
    chunks: Ints

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def num_tokens(self) -> int:
        """Tokens of all pieces."""
        return int(self.pieces["count"].sum())


def cut(moves: SlotMoves, block_size: int, num_blocks: int) -> Pieces:
    """Cut where a block ends on either side. `num_blocks` are the pool's and those of scratch.

    Raises IndexError where a move leaves them.
    """
    _check(moves, block_size * num_blocks)
    parts = _cut(_cut(Slots(moves.source, moves.target, moves.count, moves.delta), block_size, 1), block_size, 0)
    deltas, table = np.unique(parts.delta, return_inverse=True)
    rotated = np.flatnonzero(deltas)
    number = np.full(len(deltas), -1, np.int64)
    number[rotated] = np.arange(len(rotated))
    pieces = np.empty(len(parts.source), PIECE)
    pieces["source"], pieces["source_offset"] = np.divmod(parts.source, block_size)
    pieces["target"], pieces["target_offset"] = np.divmod(parts.target, block_size)
    pieces["count"] = parts.count
    pieces["table"] = number[table]
    begins = np.ones(len(pieces), bool)
    begins[1:] = (
        (parts.target[1:] != (parts.target + parts.count)[:-1])
        | (pieces["target_offset"][1:] == 0)
        | (pieces["table"][1:] != pieces["table"][:-1])
    )
    return Pieces(pieces, deltas[rotated], np.append(np.flatnonzero(begins), len(pieces)))


def _check(moves: SlotMoves, num_slots: int) -> None:
    if not len(moves.count):
        return
    for name, start in (("reads", moves.source), ("writes", moves.target)):
        bad = (start < 0) | (moves.count < 0) | (start + moves.count > num_slots)
        if bad.any():
            at = int(np.flatnonzero(bad)[0])
            raise IndexError(
                f"move {at} {name} slots {start[at]} to {start[at] + moves.count[at] - 1}; there are 0 to "
                f"{num_slots - 1}"
            )


def _cut(moves: Slots, block_size: int, side: int) -> Slots:
    """Cut at the ends of blocks of the source (side 0) or the target (side 1); empty moves are dropped."""
    offset = (moves.source, moves.target)[side] % block_size
    parts = -(-(offset + moves.count) // block_size) * (moves.count > 0)
    if (parts == 1).all():
        return moves
    index = np.repeat(np.arange(len(parts)), parts)
    number = np.arange(len(index)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = np.maximum(number * block_size - offset[index], 0)
    end = np.minimum((number + 1) * block_size - offset[index], moves.count[index])
    return Slots(moves.source[index] + begin, moves.target[index] + begin, end - begin, moves.delta[index])
