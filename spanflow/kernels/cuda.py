"""Moves of KV on an NVIDIA GPU: the device kernel, compiled at run time by NVRTC for the GPU at hand.

NVRTC and its bindings (cuda-bindings) are what CUDA builds of torch depend on, so nothing is to be installed, and no
toolkit is needed: the source includes no header of one. Compiling takes about a second and is kept in the cache
directory.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import tempfile
from collections.abc import Callable, Sequence
from functools import cache as cached
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanflow.kernels.launch import Group, Launch, group_layers, tables_of
from spanflow.kernels.reference import KVView
from spanflow.kernels.runner import Runner
from spanflow.kernels.slots import Pieces, SlotMoves, cut

_log = logging.getLogger("spanflow")

_CORE = Path(__file__).with_name("core")
_SOURCE, _HEADERS = "rerope.cu", ("rerope.h", "rerope_gpu.h")
# Products and sums are rounded one by one, as in the reference.
_OPTIONS = ("-std=c++17", "--fmad=false")
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
#: Threads of a block, as in core/rerope_gpu.h.
NUM_THREADS = 128
_VECTOR_BYTES = 16


class GpuLaunch(ctypes.Structure):
    """All pieces on all layers of a group, and whether K and V are moved in vectors."""

    _fields_ = [("launch", Launch), ("wide_keys", ctypes.c_int32), ("wide_values", ctypes.c_int32)]


def gpu_launch(group: Group, addresses: int, pieces: int, tables: int, num_pieces: int) -> GpuLaunch:
    """What the kernel is given; all but the last are addresses of arrays, where the kernel reads them."""
    view, scratch = group.views[0], group.scratch[0]
    rotary_dim = 2 * view.rope.inv_freq.numel()
    return GpuLaunch(
        group.launch(addresses, pieces, tables, num_pieces),
        wide_keys=_in_vectors(view.keys, scratch.keys, group.addresses[:2], rotary_dim),
        wide_values=_in_vectors(view.values, scratch.values, group.addresses[2:], 0),
    )


def num_blocks(group: Group, num_pieces: int) -> int:
    """Blocks of threads of a launch: one for K and one for V of each piece on each layer."""
    return 2 * len(group.views) * num_pieces


def _in_vectors(pages: torch.Tensor, spare: torch.Tensor, addresses: np.ndarray, rotary_dim: int) -> bool:
    """Whether two vectors of dimensions at a time are all there is, and each is aligned."""
    size = _VECTOR_BYTES // pages.element_size()
    strides = (*pages.stride()[:3], spare.stride(0))
    return (
        pages.stride(3) == 1
        and all(stride % size == 0 for stride in strides)
        and not (addresses % _VECTOR_BYTES).any()
        and rotary_dim // 2 % size == 0
        and (pages.shape[3] - rotary_dim) % (2 * size) == 0
    )


class CudaRunner(Runner):
    """By the device kernel, on the current stream; for layers that `why_not(views, "cuda")` passes."""

    name = "the compiled CUDA kernel"

    def __init__(self, cubin: bytes, views: Sequence[KVView], scratch_blocks: int = 0) -> None:
        super().__init__(views, scratch_blocks)
        self._device = self.views[0].keys.device
        self._groups = group_layers(self.views, self.scratch)
        self._addresses = [torch.from_numpy(group.addresses.view(np.int64)).to(self._device) for group in self._groups]
        with torch.cuda.device(self._device):
            module = _checked("cuModuleLoadData", cubin)
            self._kernels = {
                dtype: _checked("cuModuleGetFunction", module, f"spanflow_rerope_{name}".encode())
                for dtype, name in _NAMES.items()
            }

    def run(self, wave: SlotMoves) -> None:
        """What `reference.run_slots` does, bit for bit; returns before the GPU has done it."""
        self.prepared(wave)()

    def prepared(self, wave: SlotMoves) -> Callable[[], None]:
        """Put the wave's description on the device; what is returned launches it on the stream that is current then."""
        pieces = cut(wave, self.block_size, self.num_blocks + self.scratch_blocks)
        groups = zip(self._groups, self._addresses, strict=True) if len(pieces) else ()
        launches = [self._prepared(group, addresses, pieces) for group, addresses in groups]

        def launch() -> None:
            with torch.cuda.device(self._device):
                for run in launches:
                    run()

        return launch

    def _prepared(self, group: Group, addresses: torch.Tensor, pieces: Pieces) -> Callable[[], None]:
        tables = tables_of(group.views[0].rope, pieces.deltas)
        there = _upload([tables, pieces.pieces], self._device)
        asked = gpu_launch(
            group, addresses.data_ptr(), there.data_ptr() + _aligned(tables.nbytes), there.data_ptr(), len(pieces)
        )
        kernel = self._kernels[group.views[0].keys.dtype]
        grid = num_blocks(group, len(pieces))

        def run() -> None:
            stream = torch.cuda.current_stream(self._device)
            there.record_stream(stream)
            arguments = (ctypes.c_void_p * 1)(ctypes.addressof(asked))
            where = ctypes.addressof(arguments)
            _checked("cuLaunchKernel", kernel, grid, 1, 1, NUM_THREADS, 1, 1, 0, stream.cuda_stream, where, 0)

        return run


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _VECTOR_BYTES) * _VECTOR_BYTES


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> torch.Tensor:
    """All arrays one behind the other on the device, each where a vector may begin: one copy, in the stream's order."""
    ends = np.cumsum([_aligned(array.nbytes) for array in arrays])
    here = torch.empty(int(ends[-1]), dtype=torch.uint8, pin_memory=True)
    for array, end in zip(arrays, ends, strict=True):
        begin = int(end) - _aligned(array.nbytes)
        here.numpy()[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)
    return here.to(device, non_blocking=True)


@cached
def load(cache: Path, device: torch.device) -> bytes | str:
    """The kernel for a GPU, from the directory `cache` or compiled into it, or why it can't be had."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"the kernel needs a GPU of compute capability 8.0, this one has {major}.{minor}"
    return compiled(f"sm_{major}{minor}", cache)


def compiled(architecture: str, cache: Path) -> bytes | str:
    """The kernel for an architecture such as `sm_90`, or why it can't be compiled; that needs no GPU."""
    try:
        from cuda.bindings import nvrtc

        path = cache / f"rerope-{architecture}-{_digest(nvrtc)}.cubin"
        if path.is_file():
            return path.read_bytes()
        cubin = _compile(nvrtc, architecture)
    except ImportError as error:
        return f"NVRTC is not to be had ({error}); it comes with the package cuda-bindings"
    except RuntimeError as error:  # the library is not there, or does not compile this
        return str(error)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(cubin)
        Path(file.name).replace(path)
    except OSError as error:
        _log.info("the compiled kernel is not kept in %s: %s", cache, error)
    return cubin


def _digest(nvrtc: Any) -> str:
    digest = hashlib.blake2b(digest_size=10)
    for part in (*_OPTIONS, str(nvrtc.nvrtcVersion())):
        digest.update(part.encode() + b"\0")
    for name in (_SOURCE, *_HEADERS):
        digest.update((_CORE / name).read_bytes() + b"\0")
    return digest.hexdigest()


def _compile(nvrtc: Any, architecture: str) -> bytes:
    """By NVRTC. Raises RuntimeError with what it says."""

    def call(name: str, *arguments: object) -> Any:
        status, *out = getattr(nvrtc, name)(*arguments)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise RuntimeError(f"{name} failed: {status.name}")
        return out[0] if out else None

    headers = [(_CORE / name).read_bytes() for name in _HEADERS]
    names = [name.encode() for name in _HEADERS]
    program = call("nvrtcCreateProgram", (_CORE / _SOURCE).read_bytes(), _SOURCE.encode(), len(names), headers, names)
    try:
        options = [option.encode() for option in (*_OPTIONS, f"--gpu-architecture={architecture}")]
        try:
            call("nvrtcCompileProgram", program, len(options), options)
        except RuntimeError as error:
            log = bytes(call("nvrtcGetProgramLogSize", program))
            call("nvrtcGetProgramLog", program, log)
            lines = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
            raise RuntimeError(f"{error}: {' '.join(lines[:1])}") from None
        cubin = bytes(call("nvrtcGetCUBINSize", program))
        call("nvrtcGetCUBIN", program, cubin)  # writes into it
        return cubin
    finally:
        call("nvrtcDestroyProgram", program)


def _checked(name: str, *arguments: object) -> Any:
    """Call the driver. Raises RuntimeError with the name of what went wrong."""
    from cuda.bindings import driver

    status, *out = getattr(driver, name)(*arguments)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{name} failed: {status.name}")
    return out[0] if out else None
