"""What leaves the engine as numbers: reports since the last one, their sum, and counters in Prometheus' format."""

from __future__ import annotations

from collections import Counter

import pytest

pytestmark = pytest.mark.vllm


def test_reports_hold_what_is_new() -> None:
    from spanflow.engine.vllm.metrics import Reporter, SpanStats

    counters: Counter[str] = Counter()
    reporter = Reporter(counters)
    assert reporter.take() is None
    counters["moved_tokens"] += 5
    counters["scheduled_tokens"] += 9
    first = reporter.take()
    assert first is not None
    assert first.data == {"moved_tokens": 5}
    counters.update(moved_tokens=2, hits=1)
    second = reporter.take()
    assert second is not None
    total = first.aggregate(second)
    assert total.reduce() == {"moved_tokens": 7, "hits": 1}
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()
    assert isinstance(total, SpanStats)


def test_counters_in_prometheus_format() -> None:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client import Counter as PromCounter

    from spanflow.engine.vllm.metrics import COUNTERS, SpanMetrics

    registry = CollectorRegistry()

    def counter(**options: object) -> PromCounter:
        return PromCounter(registry=registry, **options)

    metrics = SpanMetrics({PromCounter: counter}, ["model_name", "engine"], {0: ["m", "0"]})  # type: ignore[dict-item]
    metrics.observe({"moved_tokens": 41, "hits": 2, "unknown": 7})
    metrics.observe({"moved_tokens": 1})
    text = generate_latest(registry).decode()
    assert 'spanflow:moved_tokens_total{engine="0",model_name="m"} 42.0' in text
    assert all(public in text for public, _ in COUNTERS.values())
