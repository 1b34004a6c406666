"""Moves of KV in torch: V is copied, K is copied and rotated by one angle per span. The yardstick of the kernels.

Slots are `block * block_size + offset`. Sources of a batch are read before any destination of the
same move is written; moves of one batch must not read what another one of it writes.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        rotary_dim = 2 * self.inv_freq.numel()
        cos, sin = (t.float().to(keys.device) for t in self.table(delta))
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

    def run(self, move: Move) -> None:
        """Run one move on this layer."""
        if not move.num_tokens:
            return
        for pages, rotate in ((self.keys, move.delta != 0), (self.values, False)):
            block_size, head_dim = pages.shape[2], pages.shape[3]
            source = torch.tensor(move.source_blocks, device=pages.device)
            # [block, head, token, dim] -> [head, block * token, dim]: the span's tokens in a row.
            rows = pages[source].permute(1, 0, 2, 3).reshape(pages.shape[1], -1, head_dim)
            rows = rows[:, move.source_offset : move.source_offset + move.num_tokens]
            _write(pages, self.rope.apply(rows, move.delta) if rotate else rows, move, block_size)

    def key_error(self, slot: int, twin: int, delta: int) -> float:
        """How far the key at `slot`, rotated by `delta`, is from the one at `twin`, relative to its length."""
        size = self.keys.shape[2]
        key = self.rope.apply(self.keys[slot // size, :, slot % size], delta).double()
        other = self.keys[twin // size, :, twin % size].double()
        return float((key - other).norm() / other.norm().clamp_min(1e-12))


def _write(pages: torch.Tensor, rows: torch.Tensor, move: Move, block_size: int) -> None:
    """Write `rows` `[head, token, dim]`: a partial block at either end, whole blocks between in one piece."""
    done = 0
    for index, block in enumerate(move.target_blocks):
        offset = move.target_offset if index == 0 else 0
        count = min(block_size - offset, move.num_tokens - done)
        if count < block_size:
            pages[block, :, offset : offset + count] = rows[:, done : done + count]
            done += count
            continue
        whole = (move.num_tokens - done) // block_size
        blocks = torch.tensor(move.target_blocks[index : index + whole], device=pages.device)
        part = rows[:, done : done + whole * block_size].unflatten(1, (whole, block_size))
        pages[blocks] = part.transpose(0, 1)
        done += whole * block_size
        tail = move.num_tokens - done
        if tail:
            pages[move.target_blocks[index + whole], :, :tail] = rows[:, done:]
        return


def run_moves(layers: Sequence[KVView], moves: Sequence[Move]) -> None:
    """Run all moves on all layers."""
    for layer in layers:
        for move in moves:
            layer.run(move)
