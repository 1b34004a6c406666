"""What a compiled kernel is given: layers of one kind as addresses and strides, angles as tables.

The structures mirror core/rerope.h field by field.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from spanflow.kernels.reference import KVView, Rotation
from spanflow.kernels.slots import Ints

#: dtypes that kernels know, and the number each has there.
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Strides(ctypes.Structure):
    """Of `[block, head, token, head_dim]`, in elements."""

    _fields_ = [(name, ctypes.c_int64) for name in ("block", "head", "token", "dim")]


class Cache(ctypes.Structure):
    """K or V of all layers of a group: the addresses of the pool's blocks and of those of scratch."""

    _fields_ = [
        ("pool", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("at", Strides),
        ("scratch_block", ctypes.c_int64),
    ]


class Pairs(ctypes.Structure):
    """What is rotated."""

    _fields_ = [("num_pairs", ctypes.c_int32), ("neox", ctypes.c_int32)]


class Launch(ctypes.Structure):
    """All pieces on all layers of a group."""

    _fields_ = [
        ("keys", Cache),
        ("values", Cache),
        ("pieces", ctypes.c_void_p),
        ("tables", ctypes.c_void_p),
        ("num_pieces", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_blocks", "num_heads", "block_size", "head_dim")),
        ("type", ctypes.c_int32),
        ("pairs", Pairs),
    ]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers of one shape, one set of strides and one rotation: one launch. `addresses` `[4, num_layers]` are those of
    keys, scratch keys, values and scratch values."""

    views: tuple[KVView, ...]
    scratch: tuple[KVView, ...]
    addresses: np.ndarray

    @property
    def bytes_per_token(self) -> int:
        """K and V of all its layers."""
        keys = self.views[0].keys
        return int(2 * len(self.views) * keys.shape[1] * keys.shape[3] * keys.element_size())

    def launch(self, addresses: int, pieces: int, tables: int, num_pieces: int) -> Launch:
        """The group's part of a launch; all but the last are addresses of arrays, where the kernel reads them."""
        view, scratch = self.views[0], self.scratch[0]
        row = self.addresses.shape[1] * self.addresses.itemsize
        caches = [
            Cache(addresses + 2 * i * row, addresses + (2 * i + 1) * row, Strides(*pages.stride()), spare.stride(0))
            for i, (pages, spare) in enumerate(((view.keys, scratch.keys), (view.values, scratch.values)))
        ]
        num_blocks, num_heads, block_size, head_dim = view.keys.shape
        return Launch(
            *caches,
            pieces=pieces,
            tables=tables,
            num_pieces=num_pieces,
            num_layers=len(self.views),
            num_blocks=num_blocks,
            num_heads=num_heads,
            block_size=block_size,
            head_dim=head_dim,
            type=TYPES[view.keys.dtype],
            pairs=Pairs(view.rope.inv_freq.numel(), view.rope.neox),
        )


def group_layers(views: Sequence[KVView], scratch: Sequence[KVView]) -> tuple[Group, ...]:
    """Layers by dtype, shape, strides and rotation."""
    groups: dict[object, list[int]] = {}
    for index, view in enumerate(views):
        kind = (view.keys.dtype, view.keys.shape, view.keys.stride(), view.values.stride(), id(view.rope))
        groups.setdefault(kind, []).append(index)
    return tuple(_group([views[i] for i in layers], [scratch[i] for i in layers]) for layers in groups.values())


def _group(views: Sequence[KVView], scratch: Sequence[KVView]) -> Group:
    sides = (views, scratch)
    addresses = [[view.keys.data_ptr() for view in side] for side in sides]
    addresses += [[view.values.data_ptr() for view in side] for side in sides]
    return Group(tuple(views), tuple(scratch), np.array(addresses, np.uint64))


def scratch_for(views: Sequence[KVView], num_blocks: int) -> tuple[KVView, ...]:
    """Blocks of their own for each layer, as the pool's in all but the stride from block to block."""
    return tuple(KVView(_spare(view.keys, num_blocks), _spare(view.values, num_blocks), view.rope) for view in views)


def _spare(pages: torch.Tensor, num_blocks: int) -> torch.Tensor:
    inner = pages.stride()[1:]
    size = 1 + sum((length - 1) * stride for length, stride in zip(pages.shape[1:], inner, strict=True))
    line = 256 // pages.element_size()  # blocks begin where a cache's lines and a device's wide accesses do
    block = -(-size // line) * line
    storage = torch.zeros(num_blocks * block + line, dtype=pages.dtype, device=pages.device)
    begin = -storage.data_ptr() % 256 // pages.element_size()
    return storage.as_strided((num_blocks, *pages.shape[1:]), (block, *inner), begin)


def tables_of(rope: Rotation, deltas: Ints) -> np.ndarray:
    """cos, then sin, of one angle per pair and delta, as the reference rounds them: `[num_deltas, 2, num_pairs]`."""
    tables = torch.stack(rope.table(torch.from_numpy(deltas)[:, None]), 1)
    out: np.ndarray = tables.to(device="cpu", dtype=torch.float32).contiguous().numpy()
    return out


def why_not(views: Sequence[KVView], device: str) -> str:
    """What keeps a kernel of a device from serving these layers, or ''."""
    for view in views:
        keys, values = view.keys, view.values
        if keys.device.type != device or values.device != keys.device:
            return f"the KV cache is on {keys.device}"
        if keys.dtype not in TYPES or values.dtype != keys.dtype:
            return f"the KV cache holds {keys.dtype} and {values.dtype}"
        if keys.dim() != 4 or keys.shape != values.shape:
            return f"K of shape {tuple(keys.shape)} and V of {tuple(values.shape)}"
        if 2 * view.rope.inv_freq.numel() > keys.shape[3]:
            return f"{2 * view.rope.inv_freq.numel()} of {keys.shape[3]} dimensions are rotated"
    return ""
