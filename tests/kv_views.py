"""K and V of random numbers in the layouts that backends have, and moves on them; for the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spanflow.kernels.reference import KVView, Move, Rotation, run_moves
from spanflow.kernels.runner import Runner


class Shape(NamedTuple):
    """Of the cache of one layer."""

    num_blocks: int = 24
    num_heads: int = 3
    block_size: int = 16
    head_dim: int = 32

    @property
    def half(self) -> int:
        """Sources lie below this slot, targets from it on."""
        return self.num_blocks // 2 * self.block_size


SMALL = Shape()
#: Heads and blocks of several vectors each.
LARGE = Shape(24, 1, 64, 128)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("cpu", "token_major", "head_last", "odd")

MakeRunner = Callable[[Sequence[KVView]], Runner]


def rotation(rotary_dim: int = SMALL.head_dim, neox: bool = True) -> Rotation:
    return Rotation(1 / 10000 ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim), neox)


def view(layout: str, dtype: torch.dtype, rope: Rotation, seed: int = 0, shape: Shape = SMALL) -> KVView:
    """K and V of random numbers, laid out as some backend does."""
    blocks, heads, size, dims = shape
    numbers = torch.randn(blocks * heads * 2 * size * dims, generator=torch.Generator().manual_seed(seed)).to(dtype)
    match layout:
        case "cpu":
            keys, values = numbers.view(blocks, heads, 2, -1).unbind(2)
            keys = keys.view(blocks, heads, dims, size).transpose(2, 3)
            return KVView(keys, values.view(blocks, heads, size, dims), rope)
        case "token_major":  # vLLM's on GPUs, with a token's key and value in one row; by tokens in each head
            return KVView(*numbers.view(blocks, heads, size, 2 * dims).split(dims, -1), rope)
        case "head_last":  # the same by heads in each token
            return KVView(*numbers.view(blocks, size, heads, 2 * dims).transpose(1, 2).split(dims, -1), rope)
        case _:  # neither tokens nor dimensions are next to each other
            keys, values = numbers.view(blocks, dims, heads, size, 2).permute(4, 0, 2, 3, 1).unbind(0)
            return KVView(keys, values, rope)


def twin(view: KVView) -> KVView:
    """The same numbers in the same layout, elsewhere."""
    size = view.keys.untyped_storage().nbytes() // view.keys.element_size()
    storage = view.keys.as_strided((size,), (1,), 0).clone()
    return KVView(
        *(storage.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (view.keys, view.values)), view.rope
    )


def move(
    source: int, target: int, num_tokens: int, delta: int, blocks: Sequence[int] = (), size: int = SMALL.block_size
) -> Move:
    """Between slots of a row of blocks, 0, 1, 2 and so on where they are not given."""
    ids = blocks or range(1 << 20)

    def cut(slot: int) -> tuple[int, ...]:
        return tuple(ids[slot // size : -(-(slot + num_tokens) // size)])

    return Move(cut(source), source % size, cut(target), target % size, num_tokens, delta)


def some_moves(shape: Shape) -> list[Move]:
    """Whole blocks, parts of blocks, one token, and keys that are not rotated, aligned to blocks and not."""
    size, half = shape.block_size, shape.half
    return [
        move(3, half + size // 2, 2 * size + 8, 1234, size=size),
        move(3 * size + 2, half + 3 * size + 3, 1, -7, size=size),
        move(4 * size, half + 4 * size, size, 0, size=size),
        move(4 * size, half + 5 * size, size, 55, size=size),
        move(2 * size - 1, half + 6 * size + 1, 3 * size - 3, -8191, size=size),
        move(5, half + 9 * size + 3, size, 0, size=size),
    ]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same(views: Sequence[KVView], wanted: Sequence[KVView]) -> None:
    """Bit for bit."""
    for ours, theirs in zip(views, wanted, strict=True):
        assert torch.equal(bits(ours.keys), bits(theirs.keys))
        assert torch.equal(bits(ours.values), bits(theirs.values))


def assert_same_as_reference(make_runner: MakeRunner, views: Sequence[KVView], moves: Sequence[Move]) -> None:
    """A runner on `views` leaves in them what the reference leaves in their twins."""
    wanted = [twin(view) for view in views]
    run_moves(wanted, moves)
    make_runner(views)(moves)
    assert_same(views, wanted)
