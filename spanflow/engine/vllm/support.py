"""Which models and options serve spans exactly, and why the others do not."""

from __future__ import annotations

import torch

from spanflow.engine.vllm.contract import FullAttentionSpec, KVCacheConfig, VllmConfig
from spanflow.kernels.reference import Rotation

#: Rotary embeddings whose angle is a fixed frequency times the position.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

#: Parameters that make vLLM use another rotary embedding than the type names.
_ROPE_VARIANTS = ("use_fope", "mrope_section")

#: Types of KV that are rotated as they are stored.
_CACHE_TYPES = ("auto", "float32", "bfloat16", "float16")

#: Architectures that rotate neighbouring dimensions instead of halves.
_INTERLEAVED = ("ChatGLM", "Cohere", "GPTJ", "Glm", "Ernie4_5")


def rotation(vllm_config: VllmConfig) -> Rotation | str:
    """The model's rotation, or a sentence that says why it can't be told."""
    config = vllm_config.model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None) or {}
    if any(isinstance(value, dict) for value in rope.values()):
        return "its layers use different rotary embeddings"
    kind = rope.get("rope_type", "default")
    if kind not in _ROPE_TYPES:
        return f"its rotary embedding is of type {kind!r}; spans are exact for {', '.join(_ROPE_TYPES)}"
    if variants := [name for name in _ROPE_VARIANTS if rope.get(name)]:
        return f"its rotary embedding has {variants[0]}"
    if not rope.get("rope_theta"):
        return "it has no rotary embedding (no rope_theta in its config)"
    if set(getattr(config, "layer_rope_theta", None) or ()) - {rope["rope_theta"]}:
        return "its layers use different rotary embeddings"
    head_dim = vllm_config.model_config.get_head_size()
    rotary_dim = rope.get("rope_dim") or int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if kind == "default":
        inv_freq = 1.0 / rope["rope_theta"] ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        if 2 * len(inv_freq) != rotary_dim:
            return f"its config tells of {2 * len(inv_freq)} and of {rotary_dim} rotated dimensions"
    architectures = getattr(config, "architectures", None) or vllm_config.model_config.hf_config.architectures or [""]
    return Rotation(inv_freq, neox=not architectures[0].startswith(_INTERLEAVED))


def unsupported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Why this engine can't serve spans, in a few words, or '' where it can."""
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    config = model.hf_text_config
    events, groups = vllm_config.kv_events_config, kv_cache_config.kv_cache_groups
    spec = groups[0].kv_cache_spec if groups else None
    kind = type(spec).__name__
    # vLLM's names for lists that have 0 where a layer rotates nothing.
    rotates = (*(getattr(config, "no_rope_layers", None) or ()), *(getattr(config, "use_rope_layers", None) or ()))
    checks: tuple[tuple[bool, str], ...] = (
        (not cache.enable_prefix_caching, "prefix caching is off, and sources live in the prefix cache"),
        (model.runner_type != "generate", f"it is a {model.runner_type} model"),
        (model.is_encoder_decoder, "it is an encoder-decoder model"),
        (bool(model.uses_mrope), "it uses M-RoPE (positions with several axes)"),
        (bool(getattr(model, "use_mla", False)), "it uses multi-head latent attention (MLA)"),
        (len(groups) != 1, f"it has {len(groups)} kinds of KV cache (sliding window, state space or cross attention)"),
        (kind != FullAttentionSpec.__name__, f"its KV cache is {kind}, not full attention"),
        (bool(getattr(spec, "sliding_window", None)), "some of its layers attend in a sliding window"),
        (bool(getattr(spec, "attention_chunk_size", None)), "it attends in chunks"),
        (not all(rotates), "some of its layers have no rotary embedding (NoPE)"),
        (bool(getattr(config, "dual_chunk_attention_config", None)), "it attends in chunks of two kinds"),
        (len(set(getattr(config, "layer_types", None) or ["full"])) > 1, "its layers are of different types"),
        (cache.cache_dtype not in _CACHE_TYPES, f"its KV is quantised ({cache.cache_dtype})"),
        (parallel.pipeline_parallel_size > 1, "pipeline parallelism is on"),
        (vllm_config.speculative_config is not None, "speculative decoding is on"),
        (parallel.decode_context_parallel_size > 1, "context parallelism is on"),
        (parallel.prefill_context_parallel_size > 1, "context parallelism is on"),
        (bool(getattr(parallel, "enable_dbo", False)), "dual-batch overlap is on, which reads before all is written"),
        (vllm_config.aux_output_config.enabled, "what each token's layers put out is wanted, and not all are computed"),
        (events is not None and events.enable_kv_cache_events, "KV events are on"),
    )
    for failed, reason in checks:
        if failed:
            return reason
    rope = rotation(vllm_config)
    return rope if isinstance(rope, str) else ""
