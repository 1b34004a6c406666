"""Moves of KV in torch: V is copied, K is copied and rotated by one angle per span. The yardstick of the kernels.

Slots are `block * block_size + offset`. A layer's sources are all read before any of its targets is written; still,
moves of one batch must not read what another one of it writes: faster kernels don't keep to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spanflow.kernels.slots import Move, SlotMoves, Slots

__all__ = ["KVView", "Move", "Rotation", "run_moves", "run_slots"]


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding: `inv_freq` `[rotary_dim / 2]` in radians per position; `neox` pairs i with i + rotary_dim/2,
    otherwise 2i with 2i + 1. Dimensions beyond `rotary_dim` are not rotated."""

    inv_freq: torch.Tensor
    neox: bool = True

    def table(self, delta: int | torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `delta` positions, `[rotary_dim / 2]` float64; of many, where they are `[num_deltas, 1]`."""
        if isinstance(delta, torch.Tensor):
            delta = delta.to(self.inv_freq.device)
        angle = self.inv_freq.double() * delta
        return angle.cos(), angle.sin()

    def apply(self, keys: torch.Tensor, delta: int) -> torch.Tensor:
        """`keys` `[..., head_dim]` moved by `delta` positions; computed in float32, returned in their dtype."""
        return self.turn(keys, *(t.float().to(keys.device) for t in self.table(delta)))

    def turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`keys` `[..., head_dim]` by float32 tables that broadcast to `[..., rotary_dim / 2]`."""
        rotary_dim = 2 * self.inv_freq.numel()
        turned, rest = keys[..., :rotary_dim].float(), keys[..., rotary_dim:]
        if self.neox:
            a, b = turned.chunk(2, -1)
            out = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            out = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        return torch.cat((out.to(keys.dtype), rest), -1)


@dataclass(frozen=True, slots=True)
class KVView:
    """One layer: `keys` and `values` as strided views `[block, head, token, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor
    rope: Rotation

    def key_error(self, slot: int, twin: int, delta: int) -> float:
        """How far the key at `slot`, rotated by `delta`, is from the one at `twin`, relative to its length."""
        size = self.keys.shape[2]
        key = self.rope.apply(self.keys[slot // size, :, slot % size], delta).double()
        other = self.keys[twin // size, :, twin % size].double()
        return float((key - other).norm() / other.norm().clamp_min(1e-12))


def run_moves(layers: Sequence[KVView], moves: Sequence[Move]) -> None:
    """Run all moves on all layers. Their blocks may meet: all is read before anything is written."""
    if layers:
        run_slots(layers, (), Slots.of(moves, layers[0].keys.shape[2]))


def run_slots(layers: Sequence[KVView], scratch: Sequence[KVView], moves: SlotMoves) -> None:
    """Run all moves on all layers, which have blocks of one size. `scratch` has the blocks behind each one's own.

    Raises IndexError where there is no such slot.
    """
    if not layers or not len(moves.count):
        return
    index = np.repeat(np.arange(len(moves.count)), moves.count)
    within = np.arange(len(index)) - np.repeat(np.cumsum(moves.count) - moves.count, moves.count)
    source, target = (torch.from_numpy(start[index] + within) for start in (moves.source, moves.target))
    deltas = torch.from_numpy(moves.delta)
    angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for place, layer in enumerate(layers):
        pools = (layer, *scratch[place : place + 1])
        device, rope = layer.keys.device, layer.rope
        if id(rope) not in angles:
            cos, sin = (table.float().to(device)[index, None] for table in rope.table(deltas[:, None]))
            angles[id(rope)] = cos, sin
        keys, values = (_read([getattr(pool, name) for pool in pools], source) for name in ("keys", "values"))
        turned = rope.turn(keys, *angles[id(rope)])
        stays = (deltas == 0)[index, None, None].to(device)
        _write([pool.keys for pool in pools], target, torch.where(stays, keys, turned))
        _write([pool.values for pool in pools], target, values)


def _read(pools: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """What the slots hold, `[num_slots, head, head_dim]`; the blocks of `pools` count on from one to the next."""
    pages = pools[0]
    out = pages.new_empty((len(slots), pages.shape[1], pages.shape[3]))
    for pool, (which, block, offset) in zip(pools, _places(pools, slots), strict=True):
        out[which] = pool[block, :, offset]
    return out


def _write(pools: Sequence[torch.Tensor], slots: torch.Tensor, rows: torch.Tensor) -> None:
    for pool, (which, block, offset) in zip(pools, _places(pools, slots), strict=True):
        pool[block, :, offset] = rows[which]


def _places(
    pools: Sequence[torch.Tensor], slots: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """For each pool which of the slots lie in it, and their block and offset there."""
    size, device = pools[0].shape[2], pools[0].device
    ends = np.cumsum([len(pool) * size for pool in pools])
    if len(slots) and (int(slots.min()) < 0 or int(slots.max()) >= ends[-1]):
        raise IndexError(f"a move names slots {int(slots.min())} to {int(slots.max())}; there are 0 to {ends[-1] - 1}")
    for pool, end in zip(pools, ends, strict=True):
        begin = int(end) - len(pool) * size
        which = torch.nonzero((slots >= begin) & (slots < int(end)))[:, 0]
        there = slots[which] - begin
        yield which.to(device), (there // size).to(device), (there % size).to(device)
