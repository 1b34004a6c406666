"""The KV connector: on the scheduler's side the way in and out for spans, on the worker's side the moves."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch

from spanflow.engine.vllm.contract import (
    KVCacheConfig,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    Request,
    SchedulerOutput,
    SupportsHMA,
    VllmConfig,
)
from spanflow.engine.vllm.layout import layer_views
from spanflow.engine.vllm.support import rotation
from spanflow.kernels.reference import KVView, Move, run_moves


@dataclass
class StepMoves(KVConnectorMetadata):
    """The moves of one step, and pairs of slots whose first-layer keys must be equal once rotated (the probe)."""

    moves: list[Move] = field(default_factory=list)
    probes: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class ProbeResult(KVConnectorWorkerMetadata):
    """The largest difference between a rotated key and the key computed in its place, relative to its length."""

    error: float

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Of several workers the worst counts."""
        assert isinstance(other, ProbeResult)
        return ProbeResult(max(self.error, other.error))


class SpanConnector(KVConnectorBase_V1, SupportsHMA):
    """Runs moves before the forward pass; the scheduler sets `held`, `pending` and `reports`."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.pending = StepMoves()
        self.held: set[str] = set()
        self.closed = False
        self.internal: Container[str] = ()
        self.probe_error: float | None = None
        self.finished: Any = None
        self._views: list[KVView] = []
        self._result: ProbeResult | None = None

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

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take a probe's result."""
        result = connector_output.kv_connector_worker_meta
        if isinstance(result, ProbeResult):
            self.probe_error = result.error

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take 4-d views of K and V of each layer, and fault the pool's pages in, or the first requests pay for it."""
        rope = rotation(self._vllm_config)
        if isinstance(rope, str):
            return
        for cache in kv_caches.values():
            cache.zero_()
        self._views = [layer_views(cache, self._vllm_config, rope) for cache in kv_caches.values()]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Run the step's moves: they end before the forward pass reads."""
        step = self._get_connector_metadata()
        assert isinstance(step, StepMoves)
        if step.moves:
            run_moves(self._views, step.moves)
        if step.probes:
            self._result = ProbeResult(max(self._views[0].key_error(*probe) for probe in step.probes))

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Hand a probe's result back."""
        result, self._result = self._result, None
        return result

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Moves are done before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved elsewhere."""

    def wait_for_save(self) -> None:
        """Nothing is saved elsewhere."""
