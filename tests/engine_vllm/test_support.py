"""Which models and options run exactly, and why: one change at a time of a configuration that serves spans."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any

import pytest
from vllm_configuration import configuration

pytestmark = pytest.mark.vllm


def FullAttentionSpec(**options: Any) -> Any:
    return type("FullAttentionSpec", (), {"sliding_window": None, "attention_chunk_size": None} | options)()


def one_kind() -> Any:
    """What is looked at of the configuration of a KV cache of full attention."""
    return Namespace(kv_cache_groups=[Namespace(kv_cache_spec=FullAttentionSpec())])


def change(root: Any, path: str, value: Any) -> None:
    *steps, name = path.split(".")
    for step in steps:
        root = root[int(step)] if step.isdigit() else getattr(root, step)
    setattr(root, name, value)


def why(path: str = "", value: Any = None) -> str:
    from spanflow.engine.vllm.support import unsupported

    config, cache = configuration(), one_kind()
    if path:
        change(Namespace(config=config, cache=cache, text=config.model_config.hf_text_config), path, value)
    return unsupported(config, cache)


def test_a_plain_model_serves_spans() -> None:
    assert why() == ""


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_angles_that_do_not_depend_on_the_prompt_serve_spans(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 1024}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    from spanflow.engine.vllm.support import unsupported

    config, cache = configuration(), one_kind()
    config.model_config.hf_text_config = Namespace(
        **vars(config.model_config.hf_text_config) | {"rope_parameters": rope},
        hidden_size=64,
        num_attention_heads=1,
        head_dim=64,
        max_position_embeddings=8192,
        standardize_rope_params=lambda: None,
    )
    assert unsupported(config, cache) == ""


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("text.rope_parameters", {"rope_type": "dynamic", "rope_theta": 1e4}, "of type 'dynamic'"),
        ("text.rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}, "of type 'longrope'"),
        ("text.rope_parameters", {"full": {"rope_theta": 1e4}, "sliding": {"rope_theta": 1e4}}, "different rotary"),
        ("text.rope_parameters", {}, "no rotary embedding"),
        ("text.no_rope_layers", [1, 1, 0, 1], "NoPE"),
        ("text.use_rope_layers", [True, False], "NoPE"),
        ("text.layer_rope_theta", [1e4, 0], "use different rotary"),
        ("text.layer_rope_theta", [5e5, 5e5], "use different rotary"),
        ("text.dual_chunk_attention_config", {"chunk_size": 512}, "in chunks"),
        ("text.layer_types", ["full_attention", "sliding_attention"], "of different types"),
        ("config.model_config.uses_mrope", True, "M-RoPE"),
        ("config.model_config.use_mla", True, "MLA"),
        ("config.model_config.runner_type", "pooling", "pooling model"),
        ("config.model_config.is_encoder_decoder", True, "encoder-decoder"),
        ("config.cache_config.enable_prefix_caching", False, "prefix caching is off"),
        ("config.cache_config.cache_dtype", "fp8", "quantised (fp8)"),
        ("config.aux_output_config.enabled", True, "what each token's layers put out is wanted"),
        ("config.speculative_config", object(), "speculative decoding"),
        ("config.parallel_config.decode_context_parallel_size", 2, "context parallelism"),
        ("config.parallel_config.prefill_context_parallel_size", 2, "context parallelism"),
        ("config.parallel_config.pipeline_parallel_size", 2, "pipeline parallelism"),
        ("config.parallel_config.enable_dbo", True, "dual-batch overlap"),
        ("config.kv_events_config", Namespace(enable_kv_cache_events=True), "KV events"),
        ("cache.kv_cache_groups.0.kv_cache_spec", FullAttentionSpec(sliding_window=512), "sliding window"),
        ("cache.kv_cache_groups.0.kv_cache_spec", FullAttentionSpec(attention_chunk_size=512), "in chunks"),
        ("cache.kv_cache_groups.0.kv_cache_spec", type("MambaSpec", (), {})(), "MambaSpec, not full attention"),
        ("cache.kv_cache_groups", [Namespace(kv_cache_spec=FullAttentionSpec())] * 2, "2 kinds of KV cache"),
    ],
)
def test_what_would_be_wrong_runs_exactly(path: str, value: Any, reason: str) -> None:
    assert reason in why(path, value)
