"""Which implementation moves the KV of an engine: chosen once, by where its tensors are and how they look."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from spanflow.kernels.cpu import group_views, load, why_not
from spanflow.kernels.reference import KVView, Move, run_moves

_log = logging.getLogger("spanflow")

Runner = Callable[[Sequence[Move]], None]


def best_runner(views: Sequence[KVView], cache: Path) -> Runner:
    """What runs moves on these layers: the CPU kernel where it can, otherwise the reference; the log says which.

    `cache` is the directory in which compiled kernels are kept.
    """
    why = next(filter(None, map(why_not, views)), "")
    kernel = why or load(cache)
    if isinstance(kernel, str):
        _log.info("KV is moved by torch: %s", kernel)
        return lambda moves: run_moves(views, moves)
    _log.info("KV is moved by the compiled CPU kernel")
    groups = group_views(views)
    return lambda moves: kernel.run_groups(groups, moves)
