"""The device kernel: its indexing and arithmetic on the host, its compilation, and all of it where there is a GPU."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the torch tier needs torch")

from gpu_on_cpu import HostRunner  # noqa: E402
from kv_views import (  # noqa: E402
    DTYPES,
    LARGE,
    LAYOUTS,
    SMALL,
    Shape,
    assert_same,
    assert_same_as_reference,
    rotation,
    some_moves,
    twin,
    view,
)

from spanflow.cidra.moves import Moves  # noqa: E402
from spanflow.cidra.plan import plan_moves  # noqa: E402
from spanflow.kernels import build, cuda  # noqa: E402
from spanflow.kernels.dispatch import best_runner  # noqa: E402
from spanflow.kernels.reference import KVView, run_moves, run_slots  # noqa: E402

pytestmark = pytest.mark.torch

SHAPES = [
    (SMALL, (32, 16, 20, 0)),  # 20: halves of 10, which are no whole vectors
    (LARGE, (128, 64, 88)),
    (Shape(24, 2, 10, 24), (24,)),
    (Shape(24, 2, 16, 80), (80, 32)),
    (Shape(24, 1, 16, 25), (24,)),  # of an odd number of dimensions the last one is alone
]
NUM_KERNELS = len(DTYPES)


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("shape", "rotary_dims"), SHAPES)
def test_every_thread_of_every_block_on_the_host(
    gpu_on_cpu: ctypes.CDLL,
    shape: Shape,
    rotary_dims: tuple[int, ...],
    layout: str,
    dtype: torch.dtype,
    neox: bool,
) -> None:
    for rotary_dim in rotary_dims:
        rope = rotation(rotary_dim, neox)
        views = [view(layout, dtype, rope, seed, shape) for seed in range(2)]
        assert_same_as_reference(lambda views: HostRunner(gpu_on_cpu, views), views, some_moves(shape))


@pytest.mark.parametrize(
    ("layout", "dtype", "shape", "rotary_dim", "wide"),
    [
        ("token_major", torch.bfloat16, LARGE, 128, (1, 1)),
        ("head_last", torch.float32, LARGE, 128, (1, 1)),
        ("token_major", torch.bfloat16, LARGE, 64, (1, 1)),
        ("token_major", torch.bfloat16, LARGE, 88, (0, 1)),
        ("token_major", torch.bfloat16, Shape(24, 2, 16, 80), 80, (1, 1)),
        ("token_major", torch.bfloat16, Shape(24, 2, 16, 24), 24, (0, 0)),
        ("cpu", torch.bfloat16, LARGE, 128, (0, 1)),
        ("odd", torch.float32, LARGE, 128, (0, 0)),
    ],
)
def test_vectors_where_the_layout_allows(
    gpu_on_cpu: ctypes.CDLL, layout: str, dtype: torch.dtype, shape: Shape, rotary_dim: int, wide: tuple[int, int]
) -> None:
    runner = HostRunner(gpu_on_cpu, [view(layout, dtype, rotation(rotary_dim), 0, shape)], 1)
    runner(some_moves(shape)[:1])
    (launch,) = runner.launches
    assert (launch.wide_keys, launch.wide_values) == wide


def test_no_vectors_at_odd_addresses(gpu_on_cpu: ctypes.CDLL) -> None:
    numbers = torch.randn(1 + LARGE.num_blocks * LARGE.block_size * LARGE.head_dim).bfloat16()
    pages = numbers[1:].view(LARGE.num_blocks, 1, LARGE.block_size, LARGE.head_dim)
    views = [KVView(pages, pages.clone(), rotation(128))]
    wanted = [KVView(pages.clone(), views[0].values.clone(), views[0].rope)]
    runner = HostRunner(gpu_on_cpu, views)
    runner(some_moves(LARGE))
    run_moves(wanted, some_moves(LARGE))
    assert_same(views, wanted)
    assert (runner.launches[0].wide_keys, runner.launches[0].wide_values) == (0, 1)


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvcc_spills_no_register(architecture: str, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc, of any CUDA toolkit that compiles for sm_80 and sm_90")
    command = [nvcc, *cuda._OPTIONS, f"-arch={architecture}", str(build._CORE / "rerope.cu"), "-o"]
    done = subprocess.run(
        [*command, str(tmp_path / "out.cubin"), "-cubin", "-Xptxas", "-v"], capture_output=True, text=True, check=True
    )
    assert "warning" not in done.stderr
    found = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    assert found == [("0", "0", "0")] * NUM_KERNELS, done.stderr
    subprocess.run([*command, str(tmp_path / "out.ptx"), "-ptx"], check=True)
    code = (tmp_path / "out.ptx").read_text()
    for access in ("ld", "st"):
        # Two of 16 bytes in each kernel, besides those of tables.
        assert len(re.findall(rf"\b{access}(\.global)?\.v4\.[a-z]32", code)) >= 2 * NUM_KERNELS


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_without_a_toolkit(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings", reason="needs cuda-bindings and NVRTC, which CUDA builds of torch bring")
    cubin = cuda.compiled(architecture, tmp_path)
    assert isinstance(cubin, bytes), cubin
    assert cubin.startswith(b"\x7fELF")
    for name in cuda._NAMES.values():
        assert f"spanflow_rerope_{name}".encode() in cubin
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"kept")
    assert cuda.compiled(architecture, tmp_path) == b"kept"
    assert "NVRTC_ERROR_INVALID_OPTION" in str(cuda.compiled("sm_1", tmp_path))


def test_without_nvrtc_there_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cuda.bindings", None)
    assert "it comes with the package cuda-bindings" in str(cuda.compiled("sm_90", tmp_path))


def on_gpu(layer: KVView) -> KVView:
    """The same layer in the memory of the GPU."""
    size = layer.keys.untyped_storage().nbytes() // layer.keys.element_size()
    storage = layer.keys.as_strided((size,), (1,), 0).cuda()
    pages = (storage.as_strided(t.shape, t.stride(), t.storage_offset()) for t in (layer.keys, layer.values))
    return KVView(*pages, layer.rope)


@pytest.mark.gpu
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_does_what_the_reference_does(layout: str, dtype: torch.dtype, neox: bool, tmp_path: Path) -> None:
    for shape, rotary_dims in SHAPES:
        for rotary_dim in rotary_dims:
            layers = [view(layout, dtype, rotation(rotary_dim, neox), seed, shape) for seed in range(2)]
            views = [on_gpu(layer) for layer in layers]
            runner = best_runner(views, tmp_path)
            assert isinstance(runner, cuda.CudaRunner)
            runner(some_moves(shape))
            run_moves(layers, some_moves(shape))
            assert_same([KVView(v.keys.cpu(), v.values.cpu(), v.rope) for v in views], layers)


@pytest.mark.gpu
def test_a_gpu_runs_waves_with_scratch(tmp_path: Path) -> None:
    layers = [view("head_last", torch.bfloat16, rotation(), seed) for seed in range(3)]
    runner = best_runner([on_gpu(layer) for layer in layers], tmp_path, scratch_blocks=4)
    moves = Moves.of([(0, 40, 40, 40), (40, 80, 40, 40), (80, 0, 40, -80), (200, 203, 60, 3)])
    runner.run_waves(plan_moves(moves, runner.scratch_start, runner.scratch_tokens).waves)
    wanted = [twin(layer) for layer in layers]
    run_slots(wanted, (), moves)
    assert_same([KVView(v.keys.cpu(), v.values.cpu(), v.rope) for v in runner.views], wanted)
