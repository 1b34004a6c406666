"""KV layouts as strides: one 4-d view of K and one of V per layer, `[block, head, token, head_dim]`.

vLLM gives a connector the cache of each layer as `[block, head, token, 2 * head_dim]`, whatever the order in memory.
How K and V lie in the last two dimensions is up to the attention backend. Where its kernels take smaller blocks than
the cache manager gives out, these are cut into as many, one behind the other, so that a slot has one number for both.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from spanflow.engine.vllm.contract import KVCacheConfig, VllmConfig, get_current_attn_backends
from spanflow.engine.vllm.support import rotation, unsupported
from spanflow.kernels.reference import KVView

#: Backends whose tokens have their key first, then their value.
_KEY_THEN_VALUE = ("FLASHINFER", "FLASH_ATTN", "FLEX_ATTENTION", "TRITON_ATTN")


def layer_views(
    caches: Mapping[str, torch.Tensor], vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> tuple[KVView, ...] | str:
    """K and V of all layers, by the caches that vLLM made for them; or a sentence that says why they can't be told."""
    rope = unsupported(vllm_config, kv_cache_config) or rotation(vllm_config)
    if isinstance(rope, str):
        return rope
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    backend = ", ".join(sorted(kind.get_name() for kind in get_current_attn_backends(vllm_config, [*caches])))
    if backend not in (*_KEY_THEN_VALUE, "CPU_ATTN") or spec.state_content_bytes is not None:
        return f"how its attention backend ({backend}) lays KV out is not known here"
    order = vllm_config.cache_config.get_resolved_kv_cache_layout()
    if not order.is_block_compact:  # scratch, which has the strides of the pool, would be as large
        return f"its KV cache is laid out as {order}, in which a block is not in one piece"
    for cache in caches.values():
        if cache.dim() != 4 or cache.shape[1::2] != (spec.num_kv_heads, 2 * spec.head_size):
            return f"its KV cache is of shape {tuple(cache.shape)}, not [block, head, token, 2 * {spec.head_size}]"
    if backend == "CPU_ATTN":
        return tuple(KVView(*_split_on_cpu(cache), rope) for cache in caches.values())
    half = spec.head_size
    return tuple(KVView(cache[..., :half], cache[..., half:], rope) for cache in caches.values())


def _split_on_cpu(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU backend has per block and head first K transposed, `[head_dim, token]`, then V, `[token, head_dim]`."""
    num_blocks, num_heads, block_size, width = cache.shape
    keys, values = cache.view(num_blocks, num_heads, 2, -1).unbind(2)
    keys = keys.view(num_blocks, num_heads, width // 2, block_size).transpose(2, 3)
    return keys, values.view(num_blocks, num_heads, block_size, width // 2)
