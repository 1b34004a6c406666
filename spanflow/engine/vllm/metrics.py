"""What the span engine did, summed, on vLLM's own way out for a connector's numbers: its log and Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from spanflow.engine.vllm.contract import KVConnectorStats, PromCounter

#: Counter of the resolver, its name in Prometheus, and what it says.
COUNTERS: Mapping[str, tuple[str, str]] = {
    "sources": ("spanflow:sources_materialised", "Missing spans and heads computed by internal requests."),
    "moved_tokens": ("spanflow:moved_tokens", "Tokens whose KV was moved instead of computed."),
    "ranges": ("spanflow:ranges", "Ranges computed in context: repairs, gaps and new heads."),
    "fallen": ("spanflow:fallen_families", "Assemblies begun again because a part of them was preempted."),
    "hits": ("spanflow:span_hits", "Spans whose KV was found."),
    "misses": ("spanflow:span_misses", "Spans whose KV was new or evicted."),
    "evicted": ("spanflow:span_evictions", "Spans whose KV had been here and was evicted; they are misses too."),
    "unsupported": ("spanflow:spans_unsupported", "Spans that were computed in full context, as no span."),
    "context_tokens": ("spanflow:context_tokens", "Tokens of the ranges that were computed in context."),
}


class SpanStats(KVConnectorStats):
    """The counters since the last report, as `data`."""

    def reset(self) -> None:
        """Forget what was counted."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The sum of two reports."""
        return SpanStats(data=dict(Counter(self.data) + Counter(other.data)))

    def reduce(self) -> dict[str, int | float]:
        """What the log shows."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not any(self.data.values())


class SpanMetrics:
    """Prometheus counters, one per engine and entry of `COUNTERS`."""

    def __init__(
        self,
        metric_types: Mapping[type, type],
        labelnames: list[str],
        per_engine_labelvalues: Mapping[int, list[object]],
    ) -> None:
        counter: Any = metric_types[PromCounter]
        self._counters = {}
        for name, (public, about) in COUNTERS.items():
            family = counter(name=public, documentation=about, labelnames=labelnames)
            for engine, values in per_engine_labelvalues.items():
                self._counters[name, engine] = family.labels(*values)

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add a report."""
        for name, value in transfer_stats_data.items():
            if (name, engine_idx) in self._counters and value:
                self._counters[name, engine_idx].inc(value)


class Reporter:
    """Turns running counters into reports of what is new in them."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self._reported: Counter[str] = Counter()

    def take(self) -> KVConnectorStats | None:
        """What was counted since the last call, or None."""
        new = {name: value for name in COUNTERS if (value := self._counters[name] - self._reported[name])}
        if not new:
            return None
        self._reported.update(new)
        return SpanStats(data=new)
