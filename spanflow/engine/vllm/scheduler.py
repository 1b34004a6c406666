"""vLLM's scheduler, extended: span requests wait for their sources, then are assembled and computed in one step.

Each call of `schedule()` first resolves waiting span requests (`resolver`), then lets vLLM schedule,
then checks that no member of a family ran before the ones it depends on. Requests without spans
pass through untouched.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from spanflow.engine.payload import KEY
from spanflow.engine.vllm.admission import admit
from spanflow.engine.vllm.audit import audit
from spanflow.engine.vllm.connector import SpanConnector
from spanflow.engine.vllm.contract import (
    AsyncScheduler,
    EngineCoreOutputs,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    SchedulerOutput,
    check_scheduler,
)
from spanflow.engine.vllm.resolver import Resolver


class SpanScheduler(AsyncScheduler):
    """See the module. What spans need is kept in `spans`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_scheduler(self)
        if not isinstance(self.connector, SpanConnector):
            raise TypeError(f"SpanScheduler needs the SpanConnector, got {type(self.connector).__name__}")
        self.spans = Resolver(self, self.connector)
        self.connector.finished = self._finished

    def add_request(self, request: Request) -> None:
        """Take a request; one with a payload is admitted as a span request, or refused with a reason."""
        payload = (request.sampling_params.extra_args or {}).get(KEY) if request.sampling_params else None
        if payload is not None and request.request_id not in self.requests:
            admit(self.spans, request, payload)
        super().add_request(request)

    def add_plain(self, request: Request) -> None:
        """Queue a request as vLLM does."""
        super().add_request(request)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Resolve, schedule, check."""
        self.spans.resolve()
        self.spans.make_way()
        pending = self.spans.connector.pending
        moving = bool(pending.moves or pending.probes)
        output = super().schedule(*args, **kwargs)
        output.has_sync_kv_loads |= moving
        self.spans.scheduled(output)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take the step's outputs; those of internal requests end here, those of span requests carry their report."""
        outputs: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, model_runner_output)
        spans = self.spans
        if spans.internal or spans.known:
            for client in outputs.values():
                for output in client.outputs:
                    root = spans.root(output.request_id) if output.request_id in spans.internal else None
                    if root is not None and output.prefill_stats is not None:
                        root.internal_tokens += output.prefill_stats.num_computed_tokens
                client.outputs = [o for o in client.outputs if o.request_id not in spans.internal]
                if client.finished_requests:
                    client.finished_requests = client.finished_requests - spans.internal.keys()
                for output in client.outputs:
                    state = spans.known.get(output.request_id)
                    if state is not None and output.kv_transfer_params is None:
                        output.kv_transfer_params = state.packed()
        spans.sweep()
        return outputs

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Finish requests with all that was spawned for them; what comes back are the caller's."""
        if request_ids is not None:
            ids = {request_ids} if isinstance(request_ids, str) else set(request_ids)
            request_ids = ids | self.spans.dependents(ids)
        finished = super().finish_requests(request_ids, finished_status)
        return [request for request in finished if request.request_id not in self.spans.internal]

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached KV: pins first, and families where running requests start again."""
        self.spans.forget(families=reset_running_requests)
        done: bool = super().reset_prefix_cache(reset_running_requests, reset_connector)
        return done

    def audit(self) -> dict[str, Any]:
        """Recount references, leases and families; `problems` must be empty."""
        return audit(self)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.spans.unregister_unwritten(request)
        copies = self.spans.assembled(request)
        super()._preempt_request(request, timestamp, drop_stale_output)
        self.spans.copies.add(copies)
        self.spans.preempted(request)

    def _free_blocks(self, request: Request) -> None:
        lease = self.spans.begin_lease(request)
        copies = self.spans.assembled(request)
        super()._free_blocks(request)
        self.spans.copies.add(copies)
        if lease is not None:
            lease()
        self.spans.gone(request)

    def _finished(self, request: Request) -> dict[str, Any] | None:
        state = self.spans.known.get(request.request_id)
        if state is None:
            return None
        if state.ask.audit:
            state.answers["audit"] = self.audit()
        if state.ask.probe:
            judged = self.spans.connector.is_judged  # since it was admitted
            state.answers["unsupported"] = self.spans.unsupported or ("" if judged else "its keys were not compared")
        return state.packed()
