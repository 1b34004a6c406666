"""Which implementation moves the KV of an engine: chosen once, by where its tensors are and how they look."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from spanflow.kernels import cpu, cuda
from spanflow.kernels.launch import why_not
from spanflow.kernels.reference import KVView
from spanflow.kernels.runner import Runner, TorchRunner

_log = logging.getLogger("spanflow")

__all__ = ["Runner", "best_runner"]


def best_runner(views: Sequence[KVView], cache: Path, scratch_blocks: int = 0) -> Runner:
    """What runs moves on these layers: a kernel where it can, otherwise the reference; its name says which, and why.

    `cache` is the directory in which compiled kernels are kept; `scratch_blocks` is what plans may use.
    """
    kind = views[0].keys.device.type if views else "cpu"
    runner = _cuda_runner(views, cache, scratch_blocks) if kind == "cuda" else _cpu_runner(views, cache, scratch_blocks)
    if isinstance(runner, str):
        why, runner = runner, TorchRunner(views, scratch_blocks)
        runner.name = f"torch, many times slower than the compiled kernel: {why}"
        _log.warning("KV is moved by %s", runner.name)
    return runner


def _cpu_runner(views: Sequence[KVView], cache: Path, scratch_blocks: int) -> Runner | str:
    library = why_not(views, "cpu") or cpu.load(cache)
    return library if isinstance(library, str) else cpu.CpuRunner(library, views, scratch_blocks)


def _cuda_runner(views: Sequence[KVView], cache: Path, scratch_blocks: int) -> Runner | str:
    cubin = why_not(views, "cuda") or cuda.load(cache, views[0].keys.device)
    try:
        return cubin if isinstance(cubin, str) else cuda.CudaRunner(cubin, views, scratch_blocks)
    except RuntimeError as error:
        return f"the compiled kernel can't be loaded: {error}"
