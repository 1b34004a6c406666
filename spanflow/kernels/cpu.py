"""Moves of KV on a CPU: the compiled kernel, with the reference's results bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache as cached
from pathlib import Path

import torch

from spanflow.kernels.build import build_and_load
from spanflow.kernels.launch import Launch, group_layers, tables_of
from spanflow.kernels.reference import KVView
from spanflow.kernels.runner import Runner
from spanflow.kernels.slots import SlotMoves, cut

#: From this many bytes on a launch writes past the caches. What it writes is read layer by layer, each after all
#: weights of the layers before it, so smaller ones have a chance to be found in a cache and larger ones have none.
_PAST_CACHES = 4 << 20


class _CpuLaunch(ctypes.Structure):
    _fields_ = [
        ("launch", Launch),
        ("chunks", ctypes.c_void_p),
        ("num_chunks", ctypes.c_int64),
        ("num_threads", ctypes.c_int32),
        ("past_caches", ctypes.c_int32),
    ]


class CpuRunner(Runner):
    """By the compiled kernel, on as many threads as torch has; for layers that `why_not(views, "cpu")` passes."""

    name = "the compiled CPU kernel"

    def __init__(self, library: ctypes.CDLL, views: Sequence[KVView], scratch_blocks: int = 0) -> None:
        super().__init__(views, scratch_blocks)
        self._launch = library.spanflow_rerope_run
        self._launch.restype = None
        self._launch.argtypes = [ctypes.POINTER(_CpuLaunch)]
        self._groups = group_layers(self.views, self.scratch)

    def run(self, wave: SlotMoves) -> None:
        """What `reference.run_slots` does, bit for bit."""
        pieces = cut(wave, self.block_size, self.num_blocks + self.scratch_blocks)
        if not len(pieces):
            return
        for group in self._groups:
            tables = tables_of(group.views[0].rope, pieces.deltas)
            launch = _CpuLaunch(
                group.launch(group.addresses.ctypes.data, pieces.pieces.ctypes.data, tables.ctypes.data, len(pieces)),
                chunks=pieces.chunks.ctypes.data,
                num_chunks=len(pieces.chunks) - 1,
                num_threads=torch.get_num_threads(),
                past_caches=pieces.num_tokens * group.bytes_per_token >= _PAST_CACHES,
            )
            self._launch(ctypes.byref(launch))


@cached
def load(cache: Path) -> ctypes.CDLL | str:
    """The kernel's library, compiled into the directory `cache` where it is not there yet, or why it can't be had."""
    return build_and_load("rerope_cpu.cpp", "spanflow_rerope_digest", cache)
