"""A step's moves in an order in which they can run where some of them write what others still read."""

from __future__ import annotations

from collections.abc import Sequence

from spanflow.cidra.moves import Moves
from spanflow.cidra.plan import plan_moves
from spanflow.kernels.reference import Move


def in_waves(moves: Sequence[Move], block_size: int, scratch_block: int) -> list[list[Move]]:
    """The same moves cut into waves, each of which may run in any order; what must wait goes through the block
    `scratch_block`, which nobody else may use."""
    rows = [row for move in moves for row in _rows(move, block_size)]
    plan = plan_moves(Moves.of(rows), scratch_block * block_size, block_size)
    return [[_move(*row, block_size) for row in wave.rows()] for wave in plan.waves]


def _rows(move: Move, size: int) -> list[tuple[int, int, int, int]]:
    """(source slot, target slot, tokens, delta) of each piece that lies within one block on both sides."""
    rows = []
    done = 0
    while done < move.num_tokens:
        source_block, source = divmod(move.source_offset + done, size)
        target_block, target = divmod(move.target_offset + done, size)
        count = min(size - source, size - target, move.num_tokens - done)
        first = move.source_blocks[source_block] * size + source
        rows.append((first, move.target_blocks[target_block] * size + target, count, move.delta))
        done += count
    return rows


def _move(source: int, target: int, count: int, delta: int, size: int) -> Move:
    """Slots that follow each other lie in blocks that follow each other."""
    return Move(
        tuple(range(source // size, (source + count - 1) // size + 1)),
        source % size,
        tuple(range(target // size, (target + count - 1) // size + 1)),
        target % size,
        count,
        delta,
    )
