"""Which implementation moves the KV of an engine: chosen once, by where its tensors are and how they look."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from spanflow.kernels import cpu
from spanflow.kernels.launch import why_not
from spanflow.kernels.reference import KVView
from spanflow.kernels.runner import Runner, TorchRunner

_log = logging.getLogger("spanflow")

__all__ = ["Runner", "best_runner"]


def best_runner(views: Sequence[KVView], cache: Path, scratch_blocks: int = 0) -> Runner:
    """What runs moves on these layers: a kernel where it can, otherwise the reference; the log says which.

    `cache` is the directory in which compiled kernels are kept; `scratch_blocks` is what plans may use.
    """
    why = why_not(views, "cpu")
    library = why or cpu.load(cache)
    if isinstance(library, str):
        _log.info("KV is moved by torch: %s", library)
        return TorchRunner(views, scratch_blocks)
    _log.info("KV is moved by the compiled CPU kernel")
    return cpu.CpuRunner(library, views, scratch_blocks)
