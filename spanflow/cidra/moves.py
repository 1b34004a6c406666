"""Moves between slots as arrays: ranges of tokens, and what it takes to cut them up and join them again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """`count[i]` tokens from slot `source[i]` on go to slot `target[i]` on, their keys rotated by `delta[i]` positions.

    Four arrays `[num_moves]`. A slot is the place of one token in the pool.
    """

    source: Ints
    target: Ints
    count: Ints
    delta: Ints

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int, int, int]]) -> Moves:
        """From (source, target, count, delta) each."""
        table = np.array(list(rows), np.int64).reshape(-1, 4)
        return cls(*np.ascontiguousarray(table.T))

    def __len__(self) -> int:
        return len(self.source)

    @property
    def num_tokens(self) -> int:
        """Tokens of all moves."""
        return int(self.count.sum())

    def take(self, which: NDArray[np.bool_] | Ints) -> Moves:
        """Some of them."""
        return Moves(self.source[which], self.target[which], self.count[which], self.delta[which])

    def rows(self) -> list[tuple[int, int, int, int]]:
        """(source, target, count, delta) each."""
        return list(zip(*(a.tolist() for a in (self.source, self.target, self.count, self.delta)), strict=True))

    def tokens(self) -> Moves:
        """One move per token."""
        before = np.cumsum(self.count) - self.count
        within = np.arange(self.num_tokens) - np.repeat(before, self.count)
        source, target, delta = (np.repeat(a, self.count) for a in (self.source, self.target, self.delta))
        return Moves(source + within, target + within, np.ones(len(within), np.int64), delta)


def joined(parts: Iterable[Moves]) -> Moves:
    """All moves of `parts`, with neighbours that continue each other made one."""
    some = list(parts)
    source, target, count, delta = (
        np.concatenate([getattr(part, name) for part in some] or [np.empty(0, np.int64)])
        for name in ("source", "target", "count", "delta")
    )
    if not len(source):
        return Moves(source, target, count, delta)
    new = np.ones(len(source), bool)
    new[1:] = (
        (source[1:] != source[:-1] + count[:-1]) | (target[1:] != target[:-1] + count[:-1]) | (delta[1:] != delta[:-1])
    )
    return Moves(source[new], target[new], np.add.reduceat(count, np.flatnonzero(new)), delta[new])
