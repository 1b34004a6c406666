"""The doctor on an engine whose moves are wrong in ways that the start-up probe can't see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spanflow import Session
from spanflow.doctor import compare_spans, compare_with_oracle, recompute

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def by_one_place_too_many(start_load: Callable[..., None]) -> Callable[..., None]:
    def wrong(self: Any, context: Any) -> None:
        step = self._get_connector_metadata()
        step.moves = [replace(move, delta=move.delta + 1) for move in step.moves]
        start_load(self, context)

    return wrong


def without_one_layer(start_load: Callable[..., None]) -> Callable[..., None]:
    from spanflow.kernels.runner import TorchRunner

    def wrong(self: Any, context: Any) -> None:
        runner = self._runner
        self._runner = TorchRunner([*self._views[:10], *self._views[11:]], runner.scratch_blocks)
        try:
            start_load(self, context)
        finally:
            self._runner = runner

    return wrong


def test_wrong_moves_are_found_by_the_oracle(model_dir: Path, start_rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    start_rig.stop()
    with Session(str(model_dir), in_process=True, kv_cache_gib=0.1, max_model_len=1024) as session:
        expected = recompute(session)
        assert not isinstance(expected, str), expected

        def failed() -> list[str]:
            checks = session.on_host(lambda host: compare_with_oracle(host, expected))
            assert all(check.is_ok is not None for check in checks)
            return [check.name for check in checks if not check.is_ok]

        assert failed() == []
        from spanflow.engine.vllm.connector import SpanConnector

        right = SpanConnector.start_load_kv
        for wrong in (without_one_layer, by_one_place_too_many):
            monkeypatch.setattr(SpanConnector, "start_load_kv", wrong(right))
            assert failed() == ["moved spans against the oracle"], wrong
        # Moves that are wrong in the same way each time agree with each other.
        assert all(check.is_ok for check in session.on_host(compare_spans))
        monkeypatch.setattr(SpanConnector, "start_load_kv", right)
        assert failed() == []
