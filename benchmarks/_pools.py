"""KV pools of models' shapes, batches of moves on them, and copies of as many bytes: what rerope_rate measures."""

from __future__ import annotations

import ctypes
import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from spanflow.kernels.reference import KVView, Move, Rotation
from spanflow.kernels.slots import SlotMoves, Slots

#: Tokens in a block, by layout.
BLOCK_SIZE = {"transposed": 32, "token-major": 16}
#: By how many tokens scattered sources lie otherwise in their blocks than targets do.
_SHIFT = 5


@dataclass(frozen=True, slots=True)
class Model:
    """The shape of a model's KV."""

    name: str
    num_layers: int
    num_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """K and V of all layers."""
        return 2 * self.num_layers * self.num_heads * self.head_dim * dtype.itemsize


MODELS = {model.name: model for model in (Model("135M", 30, 3, 64), Model("1B", 16, 8, 64), Model("8B", 32, 8, 128))}


@dataclass(frozen=True, slots=True)
class Case:
    """A batch to measure: `num_spans` spans of `length` tokens each."""

    model: str
    dtype: torch.dtype
    layout: str
    scattered: bool
    length: int
    num_spans: int

    @property
    def num_tokens(self) -> int:
        """Of all spans."""
        return self.length * self.num_spans

    @property
    def num_bytes(self) -> int:
        """That are read, and as many that are written."""
        return self.num_tokens * MODELS[self.model].bytes_per_token(self.dtype)


class Pool:
    """One tensor that holds all layers: sources in the lower half of each layer's blocks, targets in the upper half.

    `half_bytes` is about the size of all sources. Each batch takes the next ones, so that none is in a cache.
    """

    def __init__(self, model: Model, dtype: torch.dtype, layout: str, half_bytes: int, device: torch.device) -> None:
        self.block_size = BLOCK_SIZE[layout]
        row = model.num_heads * model.head_dim * self.block_size
        self.num_blocks = half_bytes // (model.bytes_per_token(dtype) * self.block_size)  # of either half
        layer = 2 * 2 * self.num_blocks * row
        self.storage = torch.ones(model.num_layers * layer, dtype=dtype, device=device)
        rope = Rotation(10000.0 ** -(torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim))
        self.views = [
            KVView(*_keys_and_values(part, model, layout, 2 * self.num_blocks), rope)
            for part in self.storage.split(layer)
        ]
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Of the whole pool."""
        return self.storage.numel() * self.storage.element_size()

    def waves(self, case: Case, rng: random.Random) -> Iterator[SlotMoves]:
        """Batch after batch, for ever."""
        # A scattered span that does not begin with its block may touch one more.
        blocks = -(-(case.length + (_SHIFT if case.scattered else 0)) // self.block_size)
        if blocks * case.num_spans > self.num_blocks:
            raise ValueError(f"{case} needs {blocks * case.num_spans} blocks, there are {self.num_blocks}")
        orders = [list(range(self.num_blocks)) for _ in range(2)]
        if case.scattered:
            for order in orders:
                rng.shuffle(order)
        while True:
            if self._next + blocks * case.num_spans > self.num_blocks:
                self._next = 0
            firsts = range(self._next, self._next + blocks * case.num_spans, blocks)
            self._next += blocks * case.num_spans
            moves = [self._move(case, orders, first, blocks, 100 + 7 * place) for place, first in enumerate(firsts)]
            if case.scattered:
                yield Slots.of(moves, self.block_size)
            else:
                source = np.array(firsts) * self.block_size
                yield Slots(
                    source,
                    source + self.num_blocks * self.block_size,
                    np.full(len(firsts), case.length),
                    np.array([move.delta for move in moves]),
                )

    def _move(self, case: Case, orders: list[list[int]], first: int, blocks: int, delta: int) -> Move:
        source, target = (order[first : first + blocks] for order in orders)
        upper = tuple(block + self.num_blocks for block in target)
        return Move(tuple(source), _SHIFT if case.scattered else 0, upper, 0, case.length, delta)


def _keys_and_values(part: torch.Tensor, model: Model, layout: str, num_blocks: int) -> tuple[torch.Tensor, ...]:
    """Views `[block, head, token, head_dim]` of one layer, as vLLM's CPU backend lays it out, or as one for GPUs."""
    heads, size, dims = model.num_heads, BLOCK_SIZE[layout], model.head_dim
    if layout == "transposed":
        keys, values = part.view(num_blocks, heads, 2, size * dims).unbind(2)
        keys = keys.view(num_blocks, heads, dims, size).transpose(2, 3)
        return keys, values.view(num_blocks, heads, size, dims)
    return part.view(2, num_blocks, size, heads, dims).transpose(2, 3).unbind(0)


class Copies:
    """Copies of runs of bytes from the lower half of a pool's storage to the upper half: a memcpy of the C library in
    one thread and in as many as torch has, and torch's copy_."""

    def __init__(self, storage: torch.Tensor) -> None:
        self._low, self._high = storage.view(torch.uint8).tensor_split(2)
        self._begin = 0
        self._threads = torch.get_num_threads()
        self._others = ThreadPoolExecutor(max(1, self._threads - 1))

    def close(self) -> None:
        """End the threads."""
        self._others.shutdown()

    def ways(self) -> dict[str, Callable[[int], None]]:
        """Each way to copy so many bytes."""
        if self._low.device.type != "cpu":
            return {"copy_": self._by_torch}
        ways = {"copy_": self._by_torch, "memcpy": lambda num_bytes: self._memcpy(num_bytes, 1)}
        if self._threads > 1:
            ways[f"memcpy in {self._threads} threads"] = lambda num_bytes: self._memcpy(num_bytes, self._threads)
        return ways

    def _place(self, num_bytes: int) -> int:
        if self._begin + num_bytes > len(self._low):
            self._begin = 0
        begin, self._begin = self._begin, self._begin + -(-num_bytes // 4096) * 4096
        return begin

    def _by_torch(self, num_bytes: int) -> None:
        begin = self._place(num_bytes)
        self._high[begin : begin + num_bytes].copy_(self._low[begin : begin + num_bytes])

    def _memcpy(self, num_bytes: int, num_threads: int) -> None:
        begin = self._place(num_bytes)
        bounds = [begin + num_bytes * part // num_threads for part in range(num_threads + 1)]
        waiting = [self._others.submit(self._copy, *bounds[i : i + 2]) for i in range(1, num_threads)]
        self._copy(*bounds[:2])
        for one in waiting:
            one.result()

    def _copy(self, begin: int, end: int) -> None:
        ctypes.memmove(self._high.data_ptr() + begin, self._low.data_ptr() + begin, end - begin)


def timer(device: torch.device) -> Callable[[Callable[[], object]], float]:
    """What measures how many milliseconds a call takes, on a GPU until it has done its work."""
    if device.type == "cpu":

        def on_cpu(call: Callable[[], object]) -> float:
            begun = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begun)

        return on_cpu

    def on_gpu(call: Callable[[], object]) -> float:
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(device)
        begun.record()
        call()
        ended.record()
        ended.synchronize()
        return float(begun.elapsed_time(ended))

    return on_gpu


def cases(device: torch.device, *, quick: bool) -> list[Case]:
    """What is measured: by length, by spans in a batch, by layout and type, and by model; contiguous and scattered."""
    on_cpu = device.type == "cpu"
    first, layouts = ("135M", ("transposed", "token-major")) if on_cpu else ("8B", ("token-major",))
    types = (torch.float32, torch.bfloat16, torch.float16)
    base = types[0] if on_cpu else types[1]
    lengths = (16, 512, 8192) if quick else (16, 64, 256, 512, 1024, 2048, 4096, 8192)
    rows = [(first, base, layouts[0], length, 1) for length in lengths]
    rows += [(first, base, layouts[0], 512, spans) for spans in ((4,) if quick else (4, 16))]
    rows += [(first, dtype, layout, 2048, 1) for dtype in types for layout in layouts]
    rows += [(model, dtype, layouts[0], 2048, 1) for model in MODELS for dtype in types[:2]]
    chosen = dict.fromkeys(
        Case(model, dtype, layout, scattered, length, spans)
        for (model, dtype, layout, length, spans), scattered in itertools.product(rows, (False, True))
    )
    # Cases of one pool stand together: a pool is made once.
    return sorted(chosen, key=lambda case: (case.model, str(case.dtype), case.layout, case.num_tokens, case.scattered))
