"""Requests whose spans are computed in context, with the reason, and payloads that are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import HEADER, document, judge, other_kv, plain, prompt, start

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("sampling", "options", "reason"),
    [
        ({"skip_reading_prefix_cache": True}, {}, "does not read the prefix cache"),
        ({"prompt_logprobs": 1}, {}, "need every token computed"),
        ({}, {"resumable": True}, "a resumable session"),
    ],
)
def test_what_needs_full_attention_gets_it(
    model_dir: Path, sampling: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    """Also where the sources are there. Its blocks are those of an ordinary request, and found by one."""
    engine = start(model_dir, 60)
    one = prompt(document(0))
    engine.send(one)
    engine.finish()
    name = engine.send(one, sampling=sampling, **options)
    while not engine.sent[name].tokens:
        engine.step()
    engine.check()
    assert engine.statuses(name) == ["unsupported"]
    assert reason in engine.whys(name)[0]
    assert engine.scheduler.spans.counters["moved_tokens"] == 8 + 40
    if options:
        engine.abort(name)
    again = engine.send(SpanPrompt((*one.token_ids, 5)))
    engine.finish()
    engine.check()
    assert engine.sent[again].prefill.num_cached_tokens == 48


def test_blocks_that_are_hashed_in_parts_serve_no_spans(model_dir: Path) -> None:
    """vLLM would look for the hashes of its own parts of a block, and ours are of whole ones."""
    from spanflow.engine.vllm.resolver import Resolver

    engine = start(model_dir, 60)
    engine.scheduler.hash_block_size = 8
    engine.scheduler.spans = Resolver(engine.scheduler, engine.scheduler.connector)
    name = engine.send(prompt(document(0)))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["unsupported"]
    assert engine.whys(name) == ["its blocks of 16 are hashed by 8 tokens"]


@pytest.mark.parametrize(("length", "status"), [(60, "new"), (61, "unsupported")])
def test_a_source_may_not_exceed_the_window(model_dir: Path, length: int, status: str) -> None:
    """A span behind its anchor, and the token that is sampled behind it, must fit where the prompt itself does."""
    engine = start(model_dir, 60, max_model_len=64)
    span = Span(1, 1 + length, SpanPrompt(HEADER))
    name = engine.send(SpanPrompt((1, *range(100, 100 + length), 5), (span,)))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == [status]
    assert status == "new" or "64 tokens, too many for the window of 64" in engine.whys(name)[0]


def test_spans_that_do_not_fit_the_pool_run_exactly(model_dir: Path) -> None:
    """The same with an empty and with a warm pool: it depends on sizes alone."""
    engine = start(model_dir, 14, max_model_len=208)
    for _ in range(2):
        name = engine.send(prompt(*[document(n, 15) for n in range(7)]))
        engine.finish()
        engine.check()
        assert engine.statuses(name) == ["unsupported"] * 7
        assert "of the KV pool's 13" in engine.whys(name)[0]


@pytest.mark.parametrize(
    ("anchor", "is_refused"),
    [
        (NO_ANCHOR, False),
        (SpanPrompt(HEADER), False),
        (SpanPrompt((1, 2, 3)), False),
        (SpanPrompt((2, 3)), False),
        (SpanPrompt((3, 2)), True),
        (SpanPrompt((1, 2, 3, 20)), True),
    ],
)
def test_anchors_are_parts_of_the_prompt_or_headers(model_dir: Path, anchor: SpanPrompt, is_refused: bool) -> None:
    """Anything else would let a payload put text before the model that the prompt does not show."""
    engine = start(model_dir, 60)
    name = engine.send(SpanPrompt((1, 2, 3, *range(20, 40), 5), (Span(3, 23, anchor),)))
    engine.finish()
    assert ("foreign anchor" in engine.answers(name).get("error", "")) == is_refused
    assert engine.sent[name].finished
    assert len(engine.sent[name].tokens) == (not is_refused)


def test_an_output_is_taken_over_by_its_own_tenant_alone(model_dir: Path) -> None:
    engine = start(model_dir, 60)
    inner = plain(1, 20)
    first = engine.send(inner, 9, lease=Lease(consumers=9), salt="a")
    engine.finish()
    outer = judge(inner, engine.sent[first].tokens)
    for salt, is_refused in (("b", True), (None, True), ("a", False)):
        name = engine.send(outer, salt=salt)
        engine.finish()
        assert ("never ran under a lease" in engine.answers(name).get("error", "")) == is_refused
    assert engine.statuses(name) == ["hit"]


@pytest.mark.parametrize("kind", ["sliding window", "state space"])
def test_a_model_with_two_kinds_of_kv_runs_exactly_and_its_books_balance(model_dir: Path, kind: str) -> None:
    """In each step and at the end, with spans and leases asked for; nothing is held back for a lease."""
    engine = start(model_dir, 80, others=[other_kv(kind)])
    inner = prompt(document(0), document(1))
    first = engine.send(inner, 9, lease=Lease(consumers=9))
    engine.finish()
    outer = engine.send(judge(inner, engine.sent[first].tokens), 20)
    while not engine.sent[outer].finished:
        engine.step()
        engine.check()
    assert engine.statuses(first) == ["unsupported"] * 2
    assert engine.statuses(outer) == ["unsupported"]
    assert "2 kinds of KV cache" in engine.whys(outer)[0]
    counts = engine.scheduler.audit()
    assert (counts["leases"], counts["pins"], counts["blocks_used"]) == (0, 0, 0)


def test_another_connector_is_refused(model_dir: Path) -> None:
    from spanflow.engine.vllm.scheduler import SpanScheduler

    scheduler = start(model_dir, 60).scheduler
    config = copy.copy(scheduler.vllm_config)
    config.kv_transfer_config = None
    with pytest.raises(TypeError, match="needs the SpanConnector, got NoneType"):
        SpanScheduler(config, scheduler.kv_cache_config, scheduler.structured_output_manager, scheduler.block_size)
