"""The report of a span request on its way back: a small dict of plain values, packed here and read by the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from spanflow.engine.protocol import SpanReport, SpanStatus
from spanflow.engine.vllm.payload import KEY
from spanflow.engine.vllm.state import SpanRequest

_STATUSES: tuple[SpanStatus, ...] = get_args(SpanStatus)


def pack(state: SpanRequest) -> dict[str, Any]:
    """The report as it travels in `kv_transfer_params`."""
    spans = [
        [r.start, r.end, _STATUSES.index(r.status), r.moved, r.repaired, r.computed, r.why] for r in state.reports()
    ]
    body: dict[str, Any] = {"spans": spans, "internal": state.internal_tokens}
    return {KEY: body | state.answers}


def unpack(params: Mapping[str, Any] | None) -> tuple[tuple[SpanReport, ...], int, dict[str, Any]] | None:
    """Spans, internal tokens and answers of a packed report; None where there is none."""
    if not params or KEY not in params:
        return None
    body = dict(params[KEY])
    spans = tuple(
        SpanReport(start, end, _STATUSES[status], moved, repaired, computed, why)
        for start, end, status, moved, repaired, computed, why in body.pop("spans")
    )
    return spans, body.pop("internal"), body
