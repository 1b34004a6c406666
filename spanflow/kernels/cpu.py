"""Moves of KV on a CPU: the compiled kernel behind the reference's own interface, with equal results."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as cached
from pathlib import Path

import numpy as np
import torch

from spanflow.kernels import reference
from spanflow.kernels.build import build_and_load
from spanflow.kernels.reference import KVView, Move, Rotation

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

_MOVE = np.dtype(
    [
        ("first_source", np.int64),
        ("first_target", np.int64),
        ("num_tokens", np.int64),
        ("source_offset", np.int32),
        ("target_offset", np.int32),
        ("table", np.int64),
    ]
)


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("block", "head", "token", "dim")]


class _Pairs(ctypes.Structure):
    _fields_ = [("num_pairs", ctypes.c_int32), ("neox", ctypes.c_int32)]


class _Launch(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values", "moves", "chunks", "blocks", "tables")),
        ("key_strides", _Strides),
        ("value_strides", _Strides),
        ("num_layers", ctypes.c_int64),
        ("num_moves", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("dtype", "num_heads", "block_size", "head_dim")),
        ("pairs", _Pairs),
        ("num_threads", ctypes.c_int32),
        ("plain", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers of one shape, one set of strides and one rotation: one launch."""

    views: tuple[KVView, ...]
    keys: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, slots=True)
class _Batch:
    """Moves as arrays: `moves` `[num_moves]` of _MOVE, the blocks of all, target blocks before each, each one's delta
    where its keys are rotated."""

    moves: np.ndarray
    blocks: np.ndarray
    chunks: np.ndarray
    deltas: tuple[int, ...]


class CpuKernel:
    """The compiled kernel. `plain` keeps it from choosing AVX2."""

    def __init__(self, library: ctypes.CDLL, *, plain: bool = False) -> None:
        self._run = library.spanflow_rerope_run
        self._run.restype = None
        self._run.argtypes = [ctypes.POINTER(_Launch)]
        self._plain = plain

    def run_moves(self, views: Sequence[KVView], moves: Sequence[Move]) -> None:
        """Run all moves on all layers, which `why_not` has passed; what `reference.run_moves` does, bit for bit.

        Runs on as many threads as torch does. Raises IndexError, before anything is written, where a move
        names a block that a layer lacks, or has more tokens than its blocks hold.
        """
        self.run_groups(group_views(views), moves)

    def run_groups(self, groups: Sequence[_Group], moves: Sequence[Move]) -> None:
        """`run_moves` on layers that were grouped once."""
        shapes = {(group.views[0].keys.shape[0], group.views[0].keys.shape[2]) for group in groups}
        batches = {shape: _pack(moves, *shape) for shape in shapes}
        for group in groups:
            self._launch(group, batches[group.views[0].keys.shape[0], group.views[0].keys.shape[2]])
        # A block on both sides: its tokens go through a copy of the move's own, as in the reference.
        if overlapping := [move for move in moves if _meets_itself(move)]:
            reference.run_moves([view for group in groups for view in group.views], overlapping)

    def _launch(self, group: _Group, batch: _Batch) -> None:
        if not len(batch.moves):
            return
        view = group.views[0]
        tables = np.concatenate([_table(view.rope, delta) for delta in batch.deltas] or [np.empty(0, np.float32)])
        launch = _Launch(
            keys=group.keys.ctypes.data,
            values=group.values.ctypes.data,
            moves=batch.moves.ctypes.data,
            chunks=batch.chunks.ctypes.data,
            blocks=batch.blocks.ctypes.data,
            tables=tables.ctypes.data,
            key_strides=_Strides(*view.keys.stride()),
            value_strides=_Strides(*view.values.stride()),
            num_layers=len(group.views),
            num_moves=len(batch.moves),
            dtype=_DTYPES[view.keys.dtype],
            num_heads=view.keys.shape[1],
            block_size=view.keys.shape[2],
            head_dim=view.keys.shape[3],
            pairs=_Pairs(view.rope.inv_freq.numel(), view.rope.neox),
            num_threads=torch.get_num_threads(),
            plain=self._plain,
        )
        self._run(ctypes.byref(launch))


@cached
def load(cache: Path) -> CpuKernel | str:
    """The kernel, compiled into the directory `cache` where it is not there yet, or why it can't be had."""
    library = build_and_load("rerope_cpu.cpp", "spanflow_rerope_digest", cache)
    return library if isinstance(library, str) else CpuKernel(library)


def why_not(view: KVView) -> str:
    """What keeps the kernel from serving a layer, or ''."""
    keys, values = view.keys, view.values
    if keys.device.type != "cpu" or values.device.type != "cpu":
        return f"the KV cache is on {keys.device}"
    if keys.dtype not in _DTYPES or values.dtype != keys.dtype:
        return f"the KV cache holds {keys.dtype} and {values.dtype}"
    if keys.dim() != 4 or keys.shape != values.shape:
        return f"K of shape {tuple(keys.shape)} and V of {tuple(values.shape)}"
    if 2 * view.rope.inv_freq.numel() > keys.shape[3]:
        return f"{2 * view.rope.inv_freq.numel()} of {keys.shape[3]} dimensions are rotated"
    return ""


def group_views(views: Sequence[KVView]) -> tuple[_Group, ...]:
    """Layers by shape, dtype, strides and rotation, with the addresses of their tensors."""
    groups: dict[object, list[KVView]] = {}
    for view in views:
        shape = (view.keys.dtype, view.keys.shape, view.keys.stride(), view.values.stride())
        groups.setdefault((*shape, id(view.rope)), []).append(view)
    return tuple(
        _Group(
            tuple(group),
            np.array([view.keys.data_ptr() for view in group], np.uint64),
            np.array([view.values.data_ptr() for view in group], np.uint64),
        )
        for group in groups.values()
    )


def _meets_itself(move: Move) -> bool:
    return move.num_tokens > 0 and not set(move.source_blocks).isdisjoint(move.target_blocks)


def _pack(moves: Sequence[Move], num_blocks: int, block_size: int) -> _Batch:
    """Check moves against a cache of `num_blocks`; those that meet themselves are left out."""
    rows: list[tuple[int, int, int, int, int, int]] = []
    blocks: list[int] = []
    chunks, tables = [0], dict[int, int]()
    for move in moves:
        for side, offset in ((move.source_blocks, move.source_offset), (move.target_blocks, move.target_offset)):
            if not (0 <= offset < block_size and 0 <= move.num_tokens <= len(side) * block_size - offset):
                raise IndexError(
                    f"a move of {move.num_tokens} tokens from offset {offset} on does not fit "
                    f"{len(side)} blocks of {block_size}"
                )
            if side and not (min(side) >= 0 and max(side) < num_blocks):
                raise IndexError(f"a move names blocks {min(side)} to {max(side)}; the cache has 0 to {num_blocks - 1}")
        if not move.num_tokens or _meets_itself(move):
            continue
        first = len(blocks)
        blocks += move.source_blocks
        blocks += move.target_blocks
        table = tables.setdefault(move.delta, len(tables)) if move.delta else -1
        row = (first, first + len(move.source_blocks), move.num_tokens, move.source_offset, move.target_offset, table)
        rows.append(row)
        chunks.append(chunks[-1] - (-(move.target_offset + move.num_tokens) // block_size))
    return _Batch(np.array(rows, _MOVE), np.array(blocks, np.int64), np.array(chunks, np.int64), tuple(tables))


def _table(rope: Rotation, delta: int) -> np.ndarray:
    """cos, then sin, of one angle per pair, as the reference rounds them."""
    cos, sin = rope.table(delta)
    out: np.ndarray = torch.cat((cos, sin)).to(device="cpu", dtype=torch.float32).numpy()
    return out
