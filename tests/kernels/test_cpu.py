"""The compiled CPU kernel does what the reference does, bit for bit, on every layout, type and alignment."""

from __future__ import annotations

import ctypes
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the torch tier needs torch")

from kv_views import (  # noqa: E402
    DTYPES,
    LARGE,
    LAYOUTS,
    SMALL,
    MakeRunner,
    Shape,
    assert_same_as_reference,
    move,
    rotation,
    some_moves,
    twin,
    view,
)

from spanflow.kernels import build, cpu  # noqa: E402
from spanflow.kernels.cpu import CpuRunner  # noqa: E402
from spanflow.kernels.dispatch import best_runner  # noqa: E402
from spanflow.kernels.launch import why_not  # noqa: E402
from spanflow.kernels.reference import KVView, Move, run_moves  # noqa: E402

pytestmark = pytest.mark.torch

HALF, BLOCK_SIZE, NUM_BLOCKS = SMALL.half, SMALL.block_size, SMALL.num_blocks
#: What the kernel may be compiled for: any processor of its kind, and what this one has.
INSTRUCTIONS = sorted({(), ("-mavx2", "-mf16c"), build.instruction_flags()})
HAS_AVX2 = build.instruction_flags() != ()


@pytest.fixture(scope="session", params=INSTRUCTIONS, ids=lambda flags: " ".join(flags) or "any")
def library(kernel_cache: Path, request: pytest.FixtureRequest) -> ctypes.CDLL:
    if request.param and not HAS_AVX2:
        pytest.skip("this processor has no AVX2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "instruction_flags", lambda: request.param)
        loaded = build.build_and_load("rerope_cpu.cpp", "spanflow_rerope_digest", kernel_cache)
    assert isinstance(loaded, ctypes.CDLL), loaded
    return loaded


@pytest.fixture(scope="session")
def make_runner(library: ctypes.CDLL) -> MakeRunner:
    return lambda views: CpuRunner(library, views)


@pytest.mark.parametrize("past_caches", [0, 1 << 40], ids=["past caches", "into caches"])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("shape", "rotary_dims"),
    [
        (SMALL, (32, 20, 0)),
        (LARGE, (128, 88)),
        (Shape(24, 2, 10, 24), (24,)),  # no whole vectors anywhere
    ],
)
def test_layouts_and_types(
    make_runner: MakeRunner,
    monkeypatch: pytest.MonkeyPatch,
    shape: Shape,
    rotary_dims: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    neox: bool,
    past_caches: int,
) -> None:
    monkeypatch.setattr(cpu, "_PAST_CACHES", past_caches)
    for rotary_dim in rotary_dims:
        rope = rotation(rotary_dim, neox)
        assert_same_as_reference(make_runner, [view(layout, dtype, rope, 1, shape)], some_moves(shape))


def test_threads_without_openmp(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_THREADS", build._THREADS[1:])
    library = build.build_and_load("rerope_cpu.cpp", "spanflow_rerope_digest", kernel_cache)
    assert not isinstance(library, str), library
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rope = rotation()
    views = [view("cpu", torch.float32, rope, seed) for seed in range(30)]
    assert_same_as_reference(lambda views: CpuRunner(library, views), views, [move(5, HALF + 9, 160, 321)])


@given(data=st.data(), layout=st.sampled_from(LAYOUTS[:3]), dtype=st.sampled_from(DTYPES))
def test_any_alignment(make_runner: MakeRunner, data: st.DataObject, layout: str, dtype: torch.dtype) -> None:
    """Blocks in any order, so that a target's block may have its tokens from several."""
    ids = data.draw(st.permutations(range(NUM_BLOCKS)))
    moves, source, target = [], 0, HALF
    while data.draw(st.booleans()) and max(source - HALF, target - 2 * HALF) < -40:
        source += data.draw(st.integers(0, 20))
        target += data.draw(st.integers(0, 20))
        num_tokens = data.draw(st.integers(0, min(90, HALF - source, 2 * HALF - target)))
        moves.append(move(source, target, num_tokens, data.draw(st.integers(-5000, 5000)), ids))
        source, target = source + num_tokens, target + num_tokens
    rope = rotation()
    assert_same_as_reference(make_runner, [view(layout, dtype, rope, seed) for seed in range(2)], moves)


def test_a_target_block_from_many_sources(make_runner: MakeRunner) -> None:
    """Token by token from anywhere, all by one angle: more pieces than are gathered at once."""
    moves = [move(7 * i % HALF, HALF + 3 + i, 1, 9) for i in range(2 * BLOCK_SIZE)]
    for layout in LAYOUTS:
        assert_same_as_reference(make_runner, [view(layout, torch.float32, rotation())], moves)


def test_layers_of_several_kinds_in_one_call(make_runner: MakeRunner) -> None:
    views = [view(layout, dtype, rotation()) for layout in LAYOUTS for dtype in DTYPES]
    assert_same_as_reference(make_runner, views, [move(1, HALF + 2, 60, 100)])


def test_many_moves_on_many_layers(make_runner: MakeRunner) -> None:
    rope = rotation()
    moves = [move(4 * i, HALF + 4 * i, 4, 17 * i - 300) for i in range(HALF // 4)]
    assert_same_as_reference(make_runner, [view("cpu", torch.float32, rope, seed) for seed in range(30)], moves)


def test_nothing_to_do(make_runner: MakeRunner) -> None:
    views = [view("cpu", torch.float32, rotation())]
    assert_same_as_reference(make_runner, views, [])
    assert_same_as_reference(make_runner, views, [Move((), 0, (), 0, 0, 5), Move((1,), 3, (2,), 0, 0, 5)])
    with pytest.raises(ValueError, match="at least one layer"):
        make_runner([])


@pytest.mark.parametrize("distance", [-17, -3, 3, 17])
def test_a_move_that_overlaps_itself_reads_before_it_writes(make_runner: MakeRunner, distance: int) -> None:
    views = [view("cpu", torch.float32, rotation()), view("token_major", torch.float32, rotation())]
    moves = [move(40, 40 + distance, 50, distance), move(200, 300, 20, 9)]
    assert_same_as_reference(make_runner, views, moves)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_numbers_at_the_ends_of_their_range_round_as_torch_does(make_runner: MakeRunner, dtype: torch.dtype) -> None:
    views = [view("cpu", dtype, rotation())]
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    flat = views[0].keys.transpose(2, 3).reshape(-1)
    count = flat.numel() // 2  # the blocks of the lower half are sources
    flat[:count] = every[torch.arange(count) * 7919 % every.numel()]
    flat[:count:50] = float("inf")
    views[0].keys.copy_(flat.view(NUM_BLOCKS, SMALL.num_heads, SMALL.head_dim, BLOCK_SIZE).transpose(2, 3))
    wanted = [twin(views[0])]
    moves = [move(3, HALF + 5, 160, 77)]
    run_moves(wanted, moves)
    make_runner(views)(moves)
    ours, theirs = views[0].keys, wanted[0].keys
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(nan=1.0), theirs.nan_to_num(nan=1.0))
    assert theirs.isinf().any()
    assert ((theirs != 0) & (theirs.abs() < torch.finfo(dtype).tiny)).any() or dtype == torch.bfloat16


def test_a_bad_move_is_refused_before_anything_is_written(make_runner: MakeRunner) -> None:
    views = [view("cpu", torch.float32, rotation())]
    before = views[0].keys.clone()
    good = move(0, HALF, 5, 1)
    for bad, words in (
        (Move((NUM_BLOCKS,), 0, (3,), 0, 4, 1), "move 1 reads slots 384 to 387; there are 0 to 383"),
        (Move((1,), 0, (-1,), 0, 4, 1), "move 1 writes slots -16 to -13; there are 0 to 383"),
        (Move((1,), 14, (3,), 0, 4, 1), "4 tokens from offset 14 on does not fit 1 blocks of 16"),
        (Move((1,), 0, (3, 4), BLOCK_SIZE, 4, 1), "from offset 16 on does not fit"),
    ):
        with pytest.raises(IndexError, match=words):
            make_runner(views)([good, bad])
    assert torch.equal(views[0].keys, before)


def test_layers_that_the_kernel_does_not_serve() -> None:
    good = view("cpu", torch.float32, rotation())

    def why(keys: torch.Tensor, values: torch.Tensor, rotary_dim: int = SMALL.head_dim) -> str:
        return why_not([good, KVView(keys, values, rotation(rotary_dim))], "cpu")

    assert why(good.keys, good.values) == ""
    assert "float64" in why(good.keys.double(), good.values.double())
    assert "meta" in why(good.keys.to("meta"), good.values.to("meta"))
    assert "64 of 32 dimensions" in why(good.keys, good.values, 64)
    assert "and V of" in why(good.keys, good.values[:2])


def test_the_runner_says_what_it_is(kernel_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype, name, is_told in (
        (torch.float32, "the compiled CPU kernel", False),
        (torch.float64, "torch, many times slower than the compiled kernel: the KV cache holds", True),
    ):
        views = [view("cpu", dtype, rotation())]
        wanted = [twin(views[0])]
        moves = [move(3, HALF + 8, 40, 1234)]
        caplog.clear()
        runner = best_runner(views, kernel_cache)
        runner(moves)
        run_moves(wanted, moves)
        assert torch.equal(views[0].keys, wanted[0].keys)
        assert runner.name.startswith(name)
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert told == ([f"KV is moved by {runner.name}"] if is_told else [])


def test_without_a_compiler_torch_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    views = [view("cpu", torch.float32, rotation())]
    wanted = [twin(views[0])]
    moves = [move(3, HALF + 8, 40, 1234)]
    best_runner(views, tmp_path)(moves)
    run_moves(wanted, moves)
    assert torch.equal(views[0].keys, wanted[0].keys)
    assert "none of the C++ compilers c++, g++, clang++ is installed" in caplog.text
