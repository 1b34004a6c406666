"""The compiled CPU kernel does what the reference does, bit for bit, on every layout, type and alignment."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the torch tier needs torch")

from spanflow.kernels import build  # noqa: E402
from spanflow.kernels.cpu import CpuKernel, load, why_not  # noqa: E402
from spanflow.kernels.dispatch import best_runner  # noqa: E402
from spanflow.kernels.reference import KVView, Move, Rotation, run_moves  # noqa: E402

pytestmark = pytest.mark.torch

NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM = 24, 3, 16, 32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LAYOUTS = ("cpu", "token_major", "head_last", "odd")


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not any(map(shutil.which, build._COMPILERS)):
        pytest.skip(f"the CPU kernel needs a C++ compiler: one of {', '.join(build._COMPILERS)}")
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="session")
def kernel(kernel_cache: Path) -> CpuKernel:
    loaded = load(kernel_cache)
    assert isinstance(loaded, CpuKernel), loaded
    return loaded


@pytest.fixture(scope="session")
def plain_kernel(kernel_cache: Path) -> CpuKernel:
    library = build.build_and_load("rerope_cpu.cpp", "spanflow_rerope_digest", kernel_cache)
    assert not isinstance(library, str), library
    return CpuKernel(library, plain=True)


def rotation(rotary_dim: int = HEAD_DIM, neox: bool = True) -> Rotation:
    return Rotation(1 / 10000 ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim), neox)


def view(layout: str, dtype: torch.dtype, rope: Rotation, seed: int = 0) -> KVView:
    """K and V of random numbers, laid out as some backend does."""
    numbers = torch.randn(
        NUM_BLOCKS * NUM_HEADS * 2 * BLOCK_SIZE * HEAD_DIM, generator=torch.Generator().manual_seed(seed)
    ).to(dtype)
    match layout:
        case "cpu":
            keys, values = numbers.view(NUM_BLOCKS, NUM_HEADS, 2, -1).unbind(2)
            keys = keys.view(NUM_BLOCKS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE).transpose(2, 3)
            return KVView(keys, values.view(NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM), rope)
        case "token_major":
            return KVView(*numbers.view(2, NUM_BLOCKS, NUM_HEADS, BLOCK_SIZE, HEAD_DIM).unbind(0), rope)
        case "head_last":
            keys, values = numbers.view(NUM_BLOCKS, 2, BLOCK_SIZE, NUM_HEADS, HEAD_DIM).transpose(2, 3).unbind(1)
            return KVView(keys, values, rope)
        case _:  # neither tokens nor dimensions are next to each other
            keys, values = numbers.view(NUM_BLOCKS, HEAD_DIM, NUM_HEADS, BLOCK_SIZE, 2).permute(4, 0, 2, 3, 1).unbind(0)
            return KVView(keys, values, rope)


def twin(view: KVView) -> KVView:
    """The same numbers in the same layout, elsewhere."""
    size = view.keys.untyped_storage().nbytes() // view.keys.element_size()
    storage = view.keys.as_strided((size,), (1,), 0).clone()
    return KVView(
        *(storage.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (view.keys, view.values)), view.rope
    )


def move(source: int, target: int, num_tokens: int, delta: int, blocks: list[int] | None = None) -> Move:
    """Between slots of a row of blocks."""
    ids = blocks or list(range(NUM_BLOCKS))

    def cut(slot: int) -> tuple[int, ...]:
        return tuple(ids[slot // BLOCK_SIZE : -(-(slot + num_tokens) // BLOCK_SIZE)])

    return Move(cut(source), source % BLOCK_SIZE, cut(target), target % BLOCK_SIZE, num_tokens, delta)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def assert_same_as_reference(kernel: CpuKernel, views: list[KVView], moves: list[Move]) -> None:
    wanted = [twin(view) for view in views]
    run_moves(wanted, moves)
    kernel.run_moves(views, moves)
    for ours, theirs in zip(views, wanted, strict=True):
        assert torch.equal(bits(ours.keys), bits(theirs.keys))
        assert torch.equal(bits(ours.values), bits(theirs.values))


HALF = NUM_BLOCKS // 2 * BLOCK_SIZE  # sources below, targets from here on


@pytest.mark.parametrize("rotary", [(HEAD_DIM, True), (HEAD_DIM, False), (20, True), (20, False), (0, True)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_and_types(kernel: CpuKernel, layout: str, dtype: torch.dtype, rotary: tuple[int, bool]) -> None:
    rope = rotation(*rotary)
    views = [view(layout, dtype, rope, seed) for seed in range(3)]
    moves = [
        move(3, HALF + 8, 40, 1234),
        move(50, HALF + 51, 1, -7),
        move(64, HALF + 64, 32, 0),
        move(99, HALF + 101, 77, -8191),
    ]
    assert_same_as_reference(kernel, views, moves)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["cpu", "token_major"])
def test_loops_for_any_cpu_equal_those_for_avx2(plain_kernel: CpuKernel, layout: str, dtype: torch.dtype) -> None:
    assert_same_as_reference(plain_kernel, [view(layout, dtype, rotation())], [move(5, HALF + 9, 100, 321)])


def test_threads_without_openmp(kernel_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_THREADS", build._THREADS[1:])
    library = build.build_and_load("rerope_cpu.cpp", "spanflow_rerope_digest", kernel_cache)
    assert not isinstance(library, str), library
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    rope = rotation()
    views = [view("cpu", torch.float32, rope, seed) for seed in range(30)]
    assert_same_as_reference(CpuKernel(library), views, [move(5, HALF + 9, 160, 321)])


@given(data=st.data(), layout=st.sampled_from(LAYOUTS[:3]))
def test_any_alignment(kernel: CpuKernel, data: st.DataObject, layout: str) -> None:
    ids = data.draw(st.permutations(range(NUM_BLOCKS)))
    moves, source, target = [], 0, HALF
    while data.draw(st.booleans()) and max(source - HALF, target - 2 * HALF) < -40:
        source += data.draw(st.integers(0, 20))
        target += data.draw(st.integers(0, 20))
        num_tokens = data.draw(st.integers(0, min(90, HALF - source, 2 * HALF - target)))
        moves.append(move(source, target, num_tokens, data.draw(st.integers(-5000, 5000)), list(ids)))
        source, target = source + num_tokens, target + num_tokens
    rope = rotation()
    assert_same_as_reference(kernel, [view(layout, torch.float32, rope, seed) for seed in range(2)], moves)


def test_layers_of_several_kinds_in_one_call(kernel: CpuKernel) -> None:
    views = [view(layout, dtype, rotation()) for layout in LAYOUTS for dtype in DTYPES]
    assert_same_as_reference(kernel, views, [move(1, HALF + 2, 60, 100)])


def test_many_moves_on_many_layers(kernel: CpuKernel) -> None:
    rope = rotation()
    moves = [move(4 * i, HALF + 4 * i, 4, 17 * i - 300) for i in range(HALF // 4)]
    assert_same_as_reference(kernel, [view("cpu", torch.float32, rope, seed) for seed in range(30)], moves)


def test_nothing_to_do(kernel: CpuKernel) -> None:
    views = [view("cpu", torch.float32, rotation())]
    assert_same_as_reference(kernel, views, [])
    assert_same_as_reference(kernel, views, [Move((), 0, (), 0, 0, 5), Move((1,), 3, (2,), 0, 0, 5)])
    kernel.run_moves([], [move(0, HALF, 5, 1)])


@pytest.mark.parametrize("distance", [-17, -3, 3, 17])
def test_a_move_that_overlaps_itself_reads_before_it_writes(kernel: CpuKernel, distance: int) -> None:
    views = [view("cpu", torch.float32, rotation()), view("token_major", torch.float32, rotation())]
    moves = [move(40, 40 + distance, 50, distance), move(200, 300, 20, 9)]
    assert_same_as_reference(kernel, views, moves)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_numbers_at_the_ends_of_their_range_round_as_torch_does(kernel: CpuKernel, dtype: torch.dtype) -> None:
    views = [view("cpu", dtype, rotation())]
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    flat = views[0].keys.transpose(2, 3).reshape(-1)
    count = flat.numel() // 2  # the blocks of the lower half are sources
    flat[:count] = every[torch.arange(count) * 7919 % every.numel()]
    flat[:count:50] = float("inf")
    views[0].keys.copy_(flat.view(NUM_BLOCKS, NUM_HEADS, HEAD_DIM, BLOCK_SIZE).transpose(2, 3))
    wanted = [twin(views[0])]
    moves = [move(3, HALF + 5, 160, 77)]
    run_moves(wanted, moves)
    kernel.run_moves(views, moves)
    ours, theirs = views[0].keys, wanted[0].keys
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num(nan=1.0), theirs.nan_to_num(nan=1.0))
    assert theirs.isinf().any()
    assert ((theirs != 0) & (theirs.abs() < torch.finfo(dtype).tiny)).any() or dtype == torch.bfloat16


def test_a_bad_move_is_refused_before_anything_is_written(kernel: CpuKernel) -> None:
    views = [view("cpu", torch.float32, rotation())]
    before = views[0].keys.clone()
    good = move(0, HALF, 5, 1)
    for bad, words in (
        (Move((NUM_BLOCKS,), 0, (3,), 0, 4, 1), f"names blocks {NUM_BLOCKS} to {NUM_BLOCKS}; the cache has 0 to 23"),
        (Move((1,), 0, (-1,), 0, 4, 1), "names blocks -1 to -1"),
        (Move((1,), 14, (3,), 0, 4, 1), "4 tokens from offset 14 on does not fit 1 blocks of 16"),
        (Move((1,), 0, (3, 4), BLOCK_SIZE, 4, 1), "from offset 16 on does not fit"),
    ):
        with pytest.raises(IndexError, match=words):
            kernel.run_moves(views, [good, bad])
    assert torch.equal(views[0].keys, before)


def test_layers_that_the_kernel_does_not_serve() -> None:
    good = view("cpu", torch.float32, rotation())
    assert why_not(good) == ""
    assert "float64" in why_not(KVView(good.keys.double(), good.values.double(), good.rope))
    assert "meta" in why_not(KVView(good.keys.to("meta"), good.values.to("meta"), good.rope))
    assert "64 of 32 dimensions" in why_not(KVView(good.keys, good.values, rotation(64)))
    assert "and V of" in why_not(KVView(good.keys, good.values[:2], good.rope))


def test_the_runner_says_what_it_is(kernel_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spanflow")
    for dtype, words in (
        (torch.float32, "by the compiled CPU kernel"),
        (torch.float64, "by torch: the KV cache holds"),
    ):
        views = [view("cpu", dtype, rotation())]
        wanted = [twin(views[0])]
        moves = [move(3, HALF + 8, 40, 1234)]
        caplog.clear()
        best_runner(views, kernel_cache)(moves)
        run_moves(wanted, moves)
        assert torch.equal(views[0].keys, wanted[0].keys)
        assert [words in record.getMessage() for record in caplog.records] == [True]


def test_without_a_compiler_torch_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    caplog.set_level(logging.INFO, "spanflow")
    views = [view("cpu", torch.float32, rotation())]
    wanted = [twin(views[0])]
    moves = [move(3, HALF + 8, 40, 1234)]
    best_runner(views, tmp_path)(moves)
    run_moves(wanted, moves)
    assert torch.equal(views[0].keys, wanted[0].keys)
    assert "none of the C++ compilers c++, g++, clang++ is installed" in caplog.text
