"""What is looked at of vLLM's configuration, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace as Namespace
from typing import Any


def configuration() -> Any:
    """Of a plain model that serves spans."""
    text = Namespace(
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        architectures=["LlamaForCausalLM"],
        layer_types=None,
        no_rope_layers=[1, 1],
        layer_rope_theta=[10_000.0, 10_000.0],
    )
    model = Namespace(
        hf_text_config=text,
        hf_config=text,
        runner_type="generate",
        is_encoder_decoder=False,
        uses_mrope=False,
        use_mla=False,
        get_head_size=lambda: 64,
    )
    return Namespace(
        model_config=model,
        cache_config=Namespace(
            enable_prefix_caching=True,
            cache_dtype="auto",
            num_gpu_blocks_override=None,
            prefix_cache_retention_interval=None,
        ),
        parallel_config=Namespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, pipeline_parallel_size=1, enable_dbo=False
        ),
        aux_output_config=Namespace(enabled=False),
        attention_config=Namespace(hisparse_config=None),
        compilation_config=Namespace(static_forward_context={}),
        kv_transfer_config=Namespace(is_kv_producer=True),
        speculative_config=None,
        kv_events_config=None,
    )
