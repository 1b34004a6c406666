"""The slow twin of the planner: moves and plans done token by token, on what each slot holds."""

from __future__ import annotations

from spanflow.cidra.moves import Moves
from spanflow.cidra.plan import Plan

#: What slots hold, where not their own: the slot that it comes from, and by how many positions it is rotated.
Held = dict[int, tuple[int, int]]


def at_once(moves: Moves) -> Held:
    """Read all, then write all."""
    held: Held = {}
    for source, target, count, delta in moves.rows():
        held.update({target + i: (source + i, delta) for i in range(count)})
    return held


def in_waves(plan: Plan) -> Held:
    """Wave after wave. Raises AssertionError where a wave reads what it writes, or writes a slot twice."""
    held: Held = {}
    for number, wave in enumerate(plan.waves):
        read = [source + i for source, _, count, _ in wave.rows() for i in range(count)]
        written = [target + i for _, target, count, _ in wave.rows() for i in range(count)]
        assert len(set(written)) == len(written), f"wave {number} writes a slot twice"
        assert not set(read) & set(written), f"wave {number} reads what it writes"
        new: Held = {}
        for source, target, count, delta in wave.rows():
            for i in range(count):
                origin, before = held.get(source + i, (source + i, 0))
                assert not before, f"wave {number} reads slot {source + i}, which is rotated already"
                new[target + i] = (origin, delta)
        held |= new
    return held
