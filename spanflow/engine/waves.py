"""A step's moves in an order in which they can run where some of them write what others still read."""

from __future__ import annotations

from collections.abc import Sequence

from spanflow.cidra.moves import Moves
from spanflow.cidra.plan import plan_moves
from spanflow.kernels.slots import Move, Slots


def in_waves(moves: Sequence[Move], block_size: int, scratch_start: int, scratch_tokens: int) -> tuple[Moves, ...]:
    """The same moves in waves, each of which may run in any order; what must wait goes through scratch slots."""
    slots = Slots.of(moves, block_size)
    return plan_moves(Moves(slots.source, slots.target, slots.count, slots.delta), scratch_start, scratch_tokens).waves
