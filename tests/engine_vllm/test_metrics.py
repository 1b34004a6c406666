"""What leaves the engine as numbers: reports since the last one, their sum, and counters in Prometheus' format."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
from symbolic_prompts import document, prompt, start

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


def test_what_requests_count_in_vllms_own_registry(model_dir: Path) -> None:
    """From the scheduler by way of vLLM's classes for a connector's numbers, in its log and in Prometheus' format."""
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client import Counter as PromCounter
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

    from spanflow.engine.vllm.metrics import COUNTERS

    engine = start(model_dir, 13)
    config = engine.scheduler.vllm_config
    registry = CollectorRegistry()

    class Prom(KVConnectorProm):  # type: ignore[misc]
        _counter_cls = partial(PromCounter, registry=registry)

    prom = Prom(config, ["engine"], {0: ["0"]})
    log = KVConnectorLogging(config.kv_transfer_config)
    for asked in (
        prompt(document(0), document(1), repair=4),
        prompt(document(1), document(0), repair=4),
        prompt(document(2), document(3)),
        prompt(document(0)),
        prompt(*[document(n) for n in range(4)]),
    ):
        engine.send(asked)
        engine.finish()
    for data in engine.reported:
        prom.observe(data)
        log.observe(data)
    lines = dict(line.rsplit(" ", 1) for line in generate_latest(registry).decode().splitlines() if line[0] != "#")
    found = {
        name: float(lines[f'{public}_total{{engine="0"}}'])
        for name, (public, _) in COUNTERS.items()
        if name != "sources"
    }
    assert found == {
        "hits": 2,
        "misses": 5,
        "evicted": 1,
        "unsupported": 4,
        "ranges": 4,
        "context_tokens": 4 * 4,
        "moved_tokens": 2 * 8 + 2 * 2 * 36 + 8 + 2 * 40 + 8 + 40,
        "fallen": 0,
    }
    said: list[str] = []
    log.log(lambda *args: said.extend(args))
    assert "evicted=1" in said[1]


@pytest.mark.parametrize("was_served", [False, True])
def test_a_span_is_counted_once(model_dir: Path, was_served: bool) -> None:
    """Though its request is given up once it was looked for, or even was served before it was preempted."""
    engine = start(model_dir, 60, max_num_batched_tokens=16)
    spans = engine.scheduler.spans
    name = engine.send(prompt(document(0), document(1), question=50))
    engine.step()
    if was_served:
        while name in spans.held:
            engine.step()
        engine.reset(True)
    assert name in spans.held
    spans.known[name].num_made = 1000
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["unsupported"] * 2
    served, unsupported = (2, 0) if was_served else (0, 2)
    found = {kind: spans.counters[kind] for kind in ("hits", "misses", "evicted", "unsupported")}
    assert found == {"hits": 0, "misses": served, "evicted": 0, "unsupported": unsupported}
