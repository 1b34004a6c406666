"""What it costs in error to rotate keys again and again, and when they are computed anew instead."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="the vllm tier needs torch")

from spanflow.kernels.reference import Rotation  # noqa: E402

pytestmark = pytest.mark.vllm

_ROPE = Rotation(1.0 / 10_000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64), neox=True)


def error_after(num_rotations: int, dtype: torch.dtype) -> float:
    """The error of keys that were rotated so often, relative to their length, against one rotation in float64."""
    generator = torch.Generator().manual_seed(0)
    exact = torch.randn(2000, 64, dtype=torch.float64, generator=generator).to(dtype).double()
    keys, order, position = exact.to(dtype), random.Random(num_rotations), 0
    for _ in range(num_rotations):
        delta = order.randint(-2000, 2000)
        keys, position = _ROPE.apply(keys, delta), position + delta
    wanted = _ROPE.apply(exact, position)
    return float(((keys.double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_are_computed_anew_before_rounding_costs_a_percent(dtype: torch.dtype) -> None:
    from spanflow.engine.vllm.assembler import MAX_ROTATIONS

    assert error_after(min(MAX_ROTATIONS[dtype.itemsize], 200), dtype) < 0.01


def test_a_hundred_rotations_in_bfloat16() -> None:
    """Errors add up like a random walk: ten times as many rotations, about three times the error."""
    one, ten, hundred = (error_after(count, torch.bfloat16) for count in (1, 10, 100))
    assert one < ten < hundred < 0.03, f"after 1, 10 and 100 rotations: {one:.4f}, {ten:.4f}, {hundred:.4f}"
    assert 2 < hundred / ten < 5
    assert error_after(100, torch.float32) < 1e-5
