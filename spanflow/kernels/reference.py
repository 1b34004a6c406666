"""Moves of KV in torch: V is copied, K is copied and rotated by one angle per span. The yardstick of the kernels.

Slots are `block * block_size + offset`. A layer's sources are all read before any of its targets is written; still,
moves of one batch must not read what another one of it writes: faster kernels don't keep to that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rotation:
    """A rotary embedding: `inv_freq` `[rotary_dim / 2]` in radians per position; `neox` pairs i with i + rotary_dim/2,
    otherwise 2i with 2i + 1. Dimensions beyond `rotary_dim` are not rotated."""

    inv_freq: torch.Tensor
    neox: bool = True

    def table(self, delta: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of `delta` positions, `[rotary_dim / 2]` float64."""
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
class Move:
    """`num_tokens` tokens from `source_blocks` (the first token at `source_offset` in the first of them) to
    `target_blocks`, their keys rotated by `delta` positions."""

    source_blocks: tuple[int, ...]
    source_offset: int
    target_blocks: tuple[int, ...]
    target_offset: int
    num_tokens: int
    delta: int


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


@dataclass(frozen=True, slots=True)
class _Batch:
    """Moves token by token: where each comes from and goes to (block and offset in it, `[num_tokens]`), its angles
    `[num_tokens, 1, rotary_dim / 2]`, and whether its keys stay as they are, `[num_tokens, 1, 1]`."""

    source: tuple[torch.Tensor, torch.Tensor]
    target: tuple[torch.Tensor, torch.Tensor]
    cos: torch.Tensor
    sin: torch.Tensor
    stays: torch.Tensor


def run_moves(layers: Sequence[KVView], moves: Sequence[Move]) -> None:
    """Run all moves on all layers."""
    moves = [move for move in moves if move.num_tokens]
    if not moves:
        return
    batches: dict[object, _Batch] = {}
    for layer in layers:
        size, device = layer.keys.shape[2], layer.keys.device
        batch = batches.get((size, device, id(layer.rope)))
        if batch is None:
            batch = batches[size, device, id(layer.rope)] = _batch(moves, size, device, layer.rope)
        keys, values = (pages[batch.source[0], :, batch.source[1]] for pages in (layer.keys, layer.values))
        turned = layer.rope.turn(keys, batch.cos, batch.sin)
        layer.keys[batch.target[0], :, batch.target[1]] = torch.where(batch.stays, keys, turned)
        layer.values[batch.target[0], :, batch.target[1]] = values


def _batch(moves: Sequence[Move], block_size: int, device: torch.device, rope: Rotation) -> _Batch:
    counts = torch.tensor([move.num_tokens for move in moves])
    cos, sin = (torch.stack(table).float() for table in zip(*(rope.table(move.delta) for move in moves), strict=True))
    stays = torch.tensor([move.delta == 0 for move in moves])[:, None]
    return _Batch(
        _places([(move.source_blocks, move.source_offset, move.num_tokens) for move in moves], block_size, device),
        _places([(move.target_blocks, move.target_offset, move.num_tokens) for move in moves], block_size, device),
        *(table.to(device).repeat_interleave(counts.to(device), 0)[:, None] for table in (cos, sin, stays)),
    )


def _places(
    ends: Iterable[tuple[tuple[int, ...], int, int]], block_size: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """From (blocks, offset, num_tokens) the block and the offset in it of each token, `[num_tokens]` each."""
    blocks, offsets = [], []
    for ids, offset, num_tokens in ends:
        slots = torch.arange(offset, offset + num_tokens)
        blocks.append(torch.tensor(ids)[slots // block_size])
        offsets.append(slots % block_size)
    return torch.cat(blocks).to(device), torch.cat(offsets).to(device)
