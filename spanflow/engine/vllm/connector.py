"""The KV connector: on the scheduler's side the way in and out for spans, on the worker's side the moves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch

from spanflow.engine.model_cache import cache_directory
from spanflow.engine.vllm.contract import (
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    SupportsHMA,
    VllmConfig,
)
from spanflow.engine.vllm.layout import layer_views
from spanflow.engine.vllm.metrics import Reporter, SpanMetrics, SpanStats
from spanflow.engine.vllm.probe import judge
from spanflow.engine.waves import in_waves
from spanflow.kernels.dispatch import Runner, best_runner
from spanflow.kernels.reference import KVView
from spanflow.kernels.slots import Move, Slots

#: Blocks beside the pool through which moves in place go: the more, the fewer waves.
_SCRATCH_BLOCKS = 8


@dataclass
class StepMoves(KVConnectorMetadata):
    """The moves of one step, and pairs of slots whose first-layer keys must be equal once rotated (the probe).

    Sources are read as they are before the step; `in_place`: some of them are written to by other moves.
    """

    moves: list[Move] = field(default_factory=list)
    in_place: bool = False
    probes: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class StepResult(KVConnectorWorkerMetadata):
    """What the worker has to say of a step.

    `move_microseconds` is the time that its moves took by the worker's clock (on a GPU that of launching them).
    `unsupported` says why spans can't be served, where the worker knows or a probe found out; `is_judged`: there was a
    probe. `moves_by` names what moves.
    """

    move_microseconds: int = 0
    unsupported: str = ""
    is_judged: bool = False
    moves_by: str = ""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several workers, which run at the same time, the slowest counts, and who can't do it."""
        assert isinstance(other, StepResult)
        return StepResult(
            max(self.move_microseconds, other.move_microseconds),
            self.unsupported or other.unsupported,
            self.is_judged and other.is_judged,
            ", ".join(dict.fromkeys((self.moves_by, other.moves_by))),
        )


class SpanConnector(KVConnectorBase_V1, SupportsHMA):
    """Runs moves before the forward pass; the scheduler sets `held`, `pending` and `reports`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.pending = StepMoves()
        self.held: set[str] = set()
        self.closed = False
        self.internal: Container[str] = ()
        self.unsupported = self.moves_by = ""
        self.is_judged = False
        self.counters: Counter[str] = Counter()
        self.finished: Any = None
        self.reporter: Reporter | None = None
        self._views: tuple[KVView, ...] = ()
        self._runner: Runner | None = None
        self._result: StepResult | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache hands nothing over: a dropped move is a later miss."""
        return False

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None holds a span request back until its sources are there, and, while `closed`, all that come after it."""
        waits = request.request_id in self.held or (self.closed and request.request_id not in self.internal)
        return (None if waits else 0), False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to note: moves are queued where a request is resolved."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand over the moves of this step."""
        step, self.pending = self.pending, StepMoves()
        return step

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The report of a span request goes back with its last output."""
        return False, self.finished(request) if self.finished is not None else None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """The counters since the last call, for vLLM's log and Prometheus."""
        return self.reporter.take() if self.reporter is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Reports that come from another process."""
        return SpanStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        """Counters in the registry of vLLM's server."""
        return SpanMetrics(metric_types, labelnames, per_engine_labelvalues)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the worker's result of a step."""
        result = connector_output.kv_connector_worker_meta
        if isinstance(result, StepResult):
            self.counters["move_microseconds"] += result.move_microseconds
            self.unsupported = result.unsupported or self.unsupported
            self.is_judged |= result.is_judged
            self.moves_by = result.moves_by

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take 4-d views of K and V of each layer, and fault the pool's pages in, or the first requests pay for it."""
        views = layer_views(kv_caches, self._vllm_config, self._kv_cache_config)
        if isinstance(views, str):
            self.unsupported = views
            return
        for cache in kv_caches.values():
            cache.zero_()
        self._views = views
        self._runner = best_runner(views, cache_directory() / "kernels", _SCRATCH_BLOCKS)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Run the step's moves: they end before the forward pass reads."""
        step = self._get_connector_metadata()
        assert isinstance(step, StepMoves)
        begun = time.perf_counter_ns()
        if step.moves:
            assert self._runner is not None
            runner, size = self._runner, self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            if step.in_place:
                runner.run_waves(in_waves(step.moves, size, runner.scratch_start, runner.scratch_tokens))
            else:
                runner.run_waves([Slots.of(step.moves, size)])
        took = (time.perf_counter_ns() - begun) // 1000
        if step.probes:
            self.unsupported = self.unsupported or judge(self._views[0], step.probes)
        if step.moves or step.probes:
            moves_by = self._runner.name if self._runner is not None else ""
            self._result = StepResult(took, self.unsupported, bool(step.probes), moves_by)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Hand the step's result back."""
        result, self._result = self._result, None
        return result

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Moves are done before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved elsewhere."""

    def wait_for_save(self) -> None:
        """Nothing is saved elsewhere."""
