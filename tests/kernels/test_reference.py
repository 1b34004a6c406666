"""The reference: a moved key is the key computed in its new place, and slots are what a loop over tokens says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the torch tier needs torch")

from spanflow.kernels.reference import KVView, Move, Rotation, run_moves  # noqa: E402

pytestmark = pytest.mark.torch

HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 16, 4, 10


def frequencies(rotary_dim: int) -> torch.Tensor:
    return 1 / 10000 ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)


def key_at(raw: torch.Tensor, position: int, rotary_dim: int, neox: bool) -> torch.Tensor:
    """A key with its position in it, in float64, by complex numbers."""
    turned = raw[..., :rotary_dim].double()
    pairs = turned.unflatten(-1, (2, -1)).transpose(-1, -2) if neox else turned.unflatten(-1, (-1, 2))
    angle = frequencies(rotary_dim) * position
    out = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones_like(angle), angle))
    out = out.transpose(-1, -2).flatten(-2) if neox else out.flatten(-2)
    return torch.cat((out, raw[..., rotary_dim:].double()), -1)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("rotary_dim", [16, 12])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("old", "new"), [(0, 1), (5, 36), (31, 8_203), (100_000, 3), (7, 7)])
def test_a_moved_key_is_the_key_computed_in_its_new_place(
    dtype: torch.dtype, tolerance: float, rotary_dim: int, neox: bool, old: int, new: int
) -> None:
    raw = torch.randn(3, 5, HEAD_DIM, generator=torch.Generator().manual_seed(old))
    there = key_at(raw, old, rotary_dim, neox).to(dtype)
    moved = Rotation(frequencies(rotary_dim), neox).apply(there, new - old)
    assert moved.dtype == dtype
    wanted = key_at(raw, new, rotary_dim, neox)
    assert float((moved.double() - wanted).abs().max() / wanted.abs().max()) < tolerance


@given(st.data())
def test_tokens_go_where_a_loop_says(data: st.DataObject) -> None:
    half = NUM_BLOCKS // 2
    ids = data.draw(st.permutations(range(NUM_BLOCKS)))
    moves = []
    for start in (0, 2):  # blocks 0 and 1, then 2 to 4, of either half
        blocks = 2 if start == 0 else 3
        source, target = (data.draw(st.integers(0, BLOCK_SIZE - 1)) for _ in range(2))
        num_tokens = data.draw(st.integers(0, blocks * BLOCK_SIZE - max(source, target)))
        sides = [tuple(ids[first : first + blocks]) for first in (start, half + start)]
        moves.append(Move(sides[0], source, sides[1], target, num_tokens, data.draw(st.integers(-50, 50))))
    rope = Rotation(frequencies(HEAD_DIM))
    keys, values = torch.randn(2, NUM_BLOCKS, 2, BLOCK_SIZE, HEAD_DIM)
    wanted_keys, wanted_values = keys.clone(), values.clone()
    for move in moves:
        for token in range(move.num_tokens):
            block, offset = divmod(move.source_offset + token, BLOCK_SIZE)
            to_block, to_offset = divmod(move.target_offset + token, BLOCK_SIZE)
            from_, to = move.source_blocks[block], move.target_blocks[to_block]
            wanted_keys[to, :, to_offset] = rope.apply(keys[from_, :, offset], move.delta)
            wanted_values[to, :, to_offset] = values[from_, :, offset]
    run_moves([KVView(keys, values, rope)], moves)
    assert torch.equal(values, wanted_values)
    assert torch.allclose(keys, wanted_keys, atol=1e-6)


def test_keys_that_are_not_rotated_stay_as_they_are() -> None:
    keys = torch.full((2, 1, BLOCK_SIZE, HEAD_DIM), float("inf"))
    keys[0, 0, 0, 0] = -0.0
    run_moves([KVView(keys, keys.clone(), Rotation(frequencies(HEAD_DIM)))], [Move((0,), 0, (1,), 0, 4, 0)])
    assert torch.equal(keys[0].view(torch.int32), keys[1].view(torch.int32))


def test_the_error_of_a_key_is_relative_to_its_length() -> None:
    rope = Rotation(frequencies(HEAD_DIM))
    keys = torch.zeros(3, 2, BLOCK_SIZE, HEAD_DIM)
    keys[0, :, 1] = torch.randn(2, HEAD_DIM)
    keys[2, :, 3] = rope.apply(keys[0, :, 1], 77)
    view = KVView(keys, keys, rope)
    assert view.key_error(1, 11, 77) < 1e-6
    keys[2] *= 2
    assert view.key_error(1, 11, 77) == pytest.approx(0.5, abs=1e-5)
