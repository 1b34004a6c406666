"""Other block sizes, models that cannot serve spans, and stock for comparison."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from span_cases import NAMED_CASES
from vllm_rig import TOLERANCE, Answer, Judge, Rig, difference, generate_candidates, probability_difference

from spanflow.engine.protocol import Lease
from spanflow.engine.vllm.client import VllmEngine
from spanflow.errors import ModelError, SpansUnsupported
from spanflow.lowering.prompt import SpanPrompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def rig(start_rig: Any, short_model_dir: Path) -> Rig:
    """Blocks of 128 tokens: vLLM's own default on a CPU."""
    rig: Rig = start_rig(short_model_dir, in_process=True, max_model_len=2048, kv_cache_gib=0.08, block_size=128)
    return rig


@pytest.fixture(scope="module")
def judge(short_judge: Judge) -> Judge:
    return short_judge


@pytest.mark.parametrize("case", NAMED_CASES)
def test_blocks_of_128(rig: Rig, judge: Judge, case: Callable[[Rig, Judge], None]) -> None:
    assert rig.scheduler.block_size == 128
    case(rig, judge)
    assert rig.audit()["blocks"] < 200


def test_a_larger_prompt_and_what_was_taken_over_on_blocks_of_128(rig: Rig, judge: Judge) -> None:
    documents = [rig.document(n, 7) for n in range(3)]
    prompt = rig.prompt(documents, repair=12)
    cold, warm = rig.one(prompt), rig.one(prompt)
    judge.check(cold, rig.one(rig.prompt(documents[::-1])))
    assert difference(cold, warm) < 1e-5
    inner = generate_candidates(rig, 3)
    outer = rig.judge(inner, repair=4)
    leased = rig.one(outer)
    assert leased.statuses == ["hit"] * 3
    judge.check(leased)
    rig.reset()
    assert probability_difference(leased, rig.one(outer)) < 1e-5


#: What makes a tiny model one that can't serve spans, its options of the engine, and why.
_UNSUPPORTED = {
    "a rotary embedding that changes with the length of the prompt": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
        {"in_process": False},
        "its rotary embedding is of type 'dynamic'",
    ),
    "quantised KV": ({}, {"kv_cache_dtype": "fp8"}, r"its KV is quantised \(fp8\)"),
    "two kinds of KV": (
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64},
        {},
        "it has 2 kinds of KV cache",
    ),
}


@pytest.fixture(params=_UNSUPPORTED.values(), ids=_UNSUPPORTED)
def other_model(request: pytest.FixtureRequest, tmp_path: Path, model_dir: Path) -> tuple[Path, dict[str, Any], str]:
    """The directory of a model that can't serve spans, options of the engine, and what is said of it."""
    from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

    changes, options, why = request.param
    kind = Gemma2Config if "layer_types" in changes else LlamaConfig
    config = kind(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        eos_token_id=2,
        bos_token_id=1,
        **changes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    for file in model_dir.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    shutil.copy(model_dir / "chat_template.jinja", tmp_path)
    return tmp_path, options, why


async def test_a_model_that_cannot_serve_spans_runs_exactly_and_says_why(
    start_rig: Any, other_model: tuple[Path, dict[str, Any], str], caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and no spans, of documents and of a leased answer alike."""
    model, options, why = other_model
    stop_running(start_rig)
    with pytest.raises(SpansUnsupported, match=f"{why}.*without require_spans"):
        await VllmEngine.start(str(model), **(options | {"in_process": True}), kv_cache_gib=0.1, require_spans=True)
    with caplog.at_level(logging.WARNING, "spanflow"):
        rig = await _rig(model, options)
    try:
        (warning,) = [r.getMessage() for r in caplog.records if r.name == "spanflow"]
        assert re.search(why, warning)
        assert re.search(why, rig.engine.info.spans_unsupported)
        prompt = await _in_thread(rig.prompt, [rig.document(1, 1), rig.document(2, 1)])
        (inner,) = await _in_thread(partial(rig.ask, rig.chat("Name a colour."), max_tokens=5, lease=Lease()))
        for asked in (prompt, rig.judge([inner], repair=2)):
            spans = await _in_thread(rig.one, asked)
            plain = await _in_thread(rig.one, SpanPrompt(asked.token_ids))
            assert spans.statuses == ["unsupported"] * len(asked.spans)
            assert all(re.search(why, span.why) for span in spans.spans)
            assert difference(spans, plain) == 0
        await _in_thread(rig.assert_idle)
        assert (await _in_thread(rig.audit))["leases"] == 0
    finally:
        await _in_thread(rig.close)


async def _in_thread(work: Any, *args: Any) -> Any:
    import asyncio

    return await asyncio.to_thread(work, *args)


async def _rig(model: Path, options: dict[str, Any]) -> Rig:
    settings = {"in_process": True, "kv_cache_gib": 0.1, "max_model_len": 512} | options
    return await _in_thread(Rig, model, settings)


def stop_running(start_rig: Any) -> None:
    """One engine at a time: the shared one is stopped before a test starts its own."""
    start_rig.stop()


async def test_a_broken_model_directory(start_rig: Any, tmp_path: Path) -> None:
    stop_running(start_rig)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=str(tmp_path)):
        await VllmEngine.start(str(tmp_path), in_process=True, kv_cache_gib=0.1)


def test_without_spans_tokens_are_those_of_stock_vllm(start_rig: Any) -> None:
    """And their log-probabilities; greedy and sampled, alone and together, with the span scheduler and without it."""
    options = {"max_model_len": 1024, "kv_cache_gib": 0.2}

    def answers(rig: Rig) -> list[Answer]:
        prompts = [rig.chat(f"Tell me about the number {number}.") for number in range(5)]
        greedy = rig.ask(*prompts, max_tokens=12)
        drawn = rig.ask(*prompts, max_tokens=12, temperature=0.9, seed=3)
        alone = [rig.one(prompt, max_tokens=12) for prompt in prompts[:2]]
        return [*greedy, *drawn, *alone]

    ours = answers(start_rig(**options))
    stock = answers(start_rig(**options, spans=False, audit_steps=False))
    for one, other in zip(ours, stock, strict=True):
        assert difference(one, other) < TOLERANCE
