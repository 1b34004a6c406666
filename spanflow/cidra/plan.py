"""CIDRA, Concurrent In-place Duplicating ReRoPE: moves that may overlap in any way become waves of independent copies.

What is asked for: all sources as they were before the first write, in all targets. A target that is still somebody's
source waits for its readers, so each token has at most one other that waits for it: the one that is written to its
source. These chains are levelled by their distance from their end, and levels become waves. Two things go through
scratch: one slot of each cycle, and the inside of long chains (a span shifted by few tokens inside its own blocks),
which would otherwise take a wave per step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spanflow.cidra.moves import Ints, Moves, joined

_NONE = -1


@dataclass(frozen=True, slots=True)
class Plan:
    """Waves to run one after another. In each, no copy reads or writes what another one writes, nor what it writes
    itself. `num_scratch` is the number of scratch slots in use at once, counted from the first."""

    waves: tuple[Moves, ...]
    num_scratch: int


def plan_moves(moves: Moves, scratch_start: int, scratch_tokens: int) -> Plan:
    """The waves that do `moves`, using at most `scratch_tokens` slots from `scratch_start` on.

    Keys are rotated once, on their last way, never when they are saved. Sources may be wanted in several places.
    Moves of a range to itself by 0 are dropped. Takes time linear in the moves where nothing overlaps; tokens that
    are both read and written cost the logarithm of their longest chain each.

    Raises ValueError where a slot is written twice, a move uses a scratch slot, a range is negative, or there is
    a cycle and no scratch.
    """
    _check_slots(moves, scratch_start, scratch_tokens)
    moves = moves.take(moves.count > 0)
    order = np.argsort(moves.target, kind="stable")
    _check_targets(moves, order)
    stays = (moves.source == moves.target) & (moves.delta == 0)
    if stays.any():
        return plan_moves(moves.take(~stays), scratch_start, scratch_tokens)
    waits, awaited = _meetings(moves, order)
    tangled = waits | awaited
    free = moves.take(~tangled)
    if not tangled.any():
        return Plan((joined([free]),) if len(free) else (), 0)
    grid = _grid(moves.take(tangled), scratch_start, scratch_tokens)
    schedule = _Schedule(grid.cells(moves.take(tangled)), scratch_tokens // grid.size)
    waves = schedule.waves(grid)
    waves[0] = joined([waves[0], free])
    return Plan(tuple(waves), schedule.num_scratch * grid.size)


@dataclass(frozen=True, slots=True)
class _Grid:
    """Slots in cells of `size`, the first of which begins at `base`: where all ranges begin and end between cells, a
    cell is planned as if it were a token. Scratch begins at `scratch_start`."""

    base: int
    size: int
    scratch_start: int

    def cells(self, moves: Moves) -> Moves:
        """One move per cell."""
        source, target = (moves.source - self.base) // self.size, (moves.target - self.base) // self.size
        return Moves(source, target, moves.count // self.size, moves.delta).tokens()

    def slot(self, cell: Ints) -> Ints:
        """The first slot of a cell."""
        return self.base + cell * self.size

    def scratch(self, cell: Ints) -> Ints:
        """The first slot of a cell of scratch."""
        return self.scratch_start + cell * self.size


def _grid(moves: Moves, scratch_start: int, scratch_tokens: int) -> _Grid:
    base = int(moves.target.min())
    size = int(np.gcd.reduce(np.concatenate((moves.source - base, moves.target - base, moves.count))))
    base = min(base, int(moves.source.min()))
    return _Grid(base, size if size <= scratch_tokens else 1, scratch_start)


def _check_slots(moves: Moves, scratch_start: int, scratch_tokens: int) -> None:
    if not len(moves):
        return
    low = min(int(moves.source.min()), int(moves.target.min()), int(moves.count.min()))
    if low < 0:
        raise ValueError(f"a move has a slot or a length of {low}; both count from 0")
    for name, start in (("reads", moves.source), ("writes", moves.target)):
        inside = (moves.count > 0) & (start < scratch_start + scratch_tokens) & (start + moves.count > scratch_start)
        if inside.any():
            at = int(np.flatnonzero(inside)[0])
            raise ValueError(
                f"move {at} {name} slots {start[at]} to {start[at] + moves.count[at] - 1}, which meet the scratch of "
                f"{scratch_tokens} slots from {scratch_start} on"
            )


def _check_targets(moves: Moves, order: Ints) -> None:
    starts, ends = moves.target[order], (moves.target + moves.count)[order]
    twice = np.flatnonzero(starts[1:] < ends[:-1])
    if len(twice):
        at = order[twice[0] + 1]
        raise ValueError(f"two moves write slot {moves.target[at]}; a slot has one source")


def _meetings(moves: Moves, order: Ints) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which targets share a slot with any source, and which sources with any target.

    Of the others' ranges more begin before the end of such a one than end before it. `order` sorts the targets,
    which do not overlap, by start and by end.
    """
    ends = moves.source + moves.count
    starts_written, ends_written = moves.target[order], (moves.target + moves.count)[order]
    waits = np.empty(len(moves), bool)
    waits[order] = np.searchsorted(np.sort(moves.source), ends_written, "left") > np.searchsorted(
        np.sort(ends), starts_written, "right"
    )
    awaited = np.searchsorted(starts_written, ends, "left") > np.searchsorted(ends_written, moves.source, "right")
    return waits, awaited


class _Schedule:
    """Tokens that read or write what others write or read: to each its wave, to some a scratch slot.

    `behind[i]` is the token that is written to the source of token i and waits for it, or _NONE.
    """

    def __init__(self, tokens: Moves, scratch_tokens: int) -> None:
        self.tokens = tokens
        self.behind = _writers(tokens)
        self.num_scratch = 0
        num_tokens = len(tokens)
        self._wave = np.zeros(num_tokens, np.int64)
        # Saves: the token whose target is saved first, the scratch slot, the wave.
        self._saves: list[tuple[Ints, Ints, int]] = []
        self._num_waves = 0

        distance, endless = _distance(self.behind)
        heads, cycle = _cycles(self.behind, endless)
        if len(heads) and not scratch_tokens:
            raise ValueError(f"{len(heads)} tokens trade places in cycles; that takes at least one slot of scratch")
        # What reads the target of a cycle's head reads it from scratch: the head waits for nobody.
        cut = np.zeros(num_tokens + 1, bool)  # one more, for _NONE
        cut[heads] = True
        self._link = np.where(cut[self.behind], _NONE, self.behind)
        if len(heads):
            distance, _ = _distance(self._link)
        self._waits = np.zeros(num_tokens + 1, bool)  # for a reader in the level before its own
        self._waits[self._link] = True
        # Where not all cycles can be cut at once, half of the scratch is left for their insides.
        at_once = max(1, scratch_tokens if len(heads) <= scratch_tokens else scratch_tokens // 2)
        batch = np.where(cycle == _NONE, 0, cycle // at_once)
        order, starts = _grouped(batch)
        for index in range(len(starts) - 1):
            members = order[starts[index] : starts[index + 1]]
            self._run_batch(members, distance, heads[index * at_once : (index + 1) * at_once], scratch_tokens)

    def _run_batch(self, members: Ints, distance: Ints, heads: Ints, scratch_tokens: int) -> None:
        """Whole components, some cycles among them: level by level, in windows of levels where that saves waves."""
        first_wave = self._num_waves
        if len(heads):
            self._save(heads, 0, first_wave)
            self._num_waves += 1
        level = distance[members].max() - distance[members]
        by_level, starts = _grouped(level)
        num_levels = len(starts) - 1
        waiting = self._waits[members]
        # How many tokens of levels before each one wait.
        before = np.concatenate(([0], np.cumsum(np.bincount(level[waiting], minlength=num_levels))))
        room = scratch_tokens - len(heads)
        low = 0
        while low < num_levels:
            # All levels of a window are written at once: what its later levels wait for is saved before.
            high = int(np.searchsorted(before, before[low + 1] + room, "right")) - 1
            high = min(max(high, low + 1), num_levels)
            if high - low < 3:
                high = low + 1
            else:
                later = by_level[starts[low + 1] : starts[high]]
                saved = np.sort(members[later[waiting[later]]])
                begins = low == 0 and len(heads)
                self._save(saved, len(heads), first_wave if begins else self._num_waves)
                self._num_waves += not begins
            self._wave[members[by_level[starts[low] : starts[high]]]] = self._num_waves
            self._num_waves += 1
            low = high

    def _save(self, writers: Ints, first_slot: int, wave: int) -> None:
        """Copy what these tokens will be written over to scratch, in the order of the pool."""
        if not len(writers):
            return
        writers = writers[np.argsort(self.tokens.target[writers], kind="stable")]
        slots = first_slot + np.arange(len(writers))
        self._saves.append((writers, slots, wave))
        self.num_scratch = max(self.num_scratch, first_slot + len(writers))

    def waves(self, grid: _Grid) -> list[Moves]:
        """The copies of each wave as slots, those in a row made one."""
        tokens = self.tokens
        sizes = np.full(len(tokens), grid.size)
        target = grid.slot(tokens.target)
        slot_of = np.full(len(tokens) + 1, _NONE, np.int64)
        parts: list[list[Moves]] = [[] for _ in range(self._num_waves)]
        for writers, slots, wave in self._saves:
            slot_of[writers] = slots
            saved = Moves(target[writers], grid.scratch(slots), sizes[writers], np.zeros(len(slots), np.int64))
            parts[wave].append(saved)
        from_scratch = slot_of[self.behind]
        source = np.where(from_scratch == _NONE, grid.slot(tokens.source), grid.scratch(from_scratch))
        ready = Moves(source, target, sizes, tokens.delta)
        order, starts = _grouped(self._wave)
        for wave in range(self._num_waves):
            parts[wave].append(ready.take(order[starts[wave] : starts[wave + 1]]))
        return [joined(part) for part in parts]


def _writers(tokens: Moves) -> Ints:
    """The token that is written to each one's source, or _NONE. Itself, where it turns in place."""
    # Zeros that nobody touches cost nothing, so a large pool does not either.
    writer = np.zeros(int(max(tokens.source.max(), tokens.target.max())) + 1, np.int64)
    writer[tokens.target] = np.arange(1, len(tokens) + 1)
    out: Ints = writer[tokens.source] - 1
    return out


def _grouped(number: Ints) -> tuple[Ints, Ints]:
    """The places of each number from 0 on, in their order, and where those of each begin, with the end of the last."""
    starts = np.concatenate(([0], np.cumsum(np.bincount(number))))
    if len(starts) == 2:
        return np.arange(len(number)), starts
    # Numbers of 16 bits are sorted by counting.
    small = number.astype(np.uint16) if len(starts) <= 1 << 16 else number
    return np.argsort(small, kind="stable"), starts


def _distance(link: Ints) -> tuple[Ints, Ints]:
    """Steps from each token to the end of its chain, and which tokens come to none: each round doubles the steps
    looked ahead, for those that are not at an end yet."""
    end = len(link)
    ahead = np.append(np.where(link == _NONE, end, link), end)
    distance = (ahead != end).astype(np.int64)
    active = np.flatnonzero(distance)
    steps = 1
    while len(active) and steps <= end:
        after = ahead[active]
        distance[active] += distance[after]
        ahead[active] = after = ahead[after]
        active = active[after != end]
        steps *= 2
    return distance[:-1], active


def _cycles(link: Ints, endless: Ints) -> tuple[Ints, Ints]:
    """The head of each cycle, and for each token the cycle that its chain ends in, or _NONE. `endless` are the tokens
    of chains without an end."""
    cycle = np.full(len(link), _NONE, np.int64)
    if not len(endless):
        return endless, cycle
    place = np.zeros(len(link), np.int64)
    place[endless] = np.arange(len(endless))
    ahead = place[link[endless]]
    lowest = np.arange(len(endless))
    steps = 1
    while steps <= len(endless):
        lowest = np.minimum(lowest, lowest[ahead])
        ahead = ahead[ahead]
        steps *= 2
    # After as many steps as there are tokens a chain has come to its cycle, and all of the cycle is reached.
    on_cycle = np.zeros(len(endless), bool)
    on_cycle[ahead] = True
    heads = np.flatnonzero(on_cycle & (lowest == np.arange(len(endless))))
    number = np.empty(len(endless), np.int64)
    number[heads] = np.arange(len(heads))
    cycle[endless] = number[lowest[ahead]]
    return endless[heads], cycle
