"""KV layouts as strides: one 4-d view of K and one of V per layer, `[block, head, token, head_dim]`."""

from __future__ import annotations

import torch

from spanflow.engine.vllm.contract import VllmConfig
from spanflow.kernels.reference import KVView, Rotation


def layer_views(cache: torch.Tensor, vllm_config: VllmConfig, rope: Rotation) -> KVView:
    """K and V of one layer's cache tensor.

    The CPU backend stores per block and head first K transposed, `[head_dim, block]`, then V,
    `[block, head_dim]`, as one row of `2 * head_dim * block` numbers. GPU backends keep K and V as
    `[2, block, token, head, head_dim]` or `[block, 2, token, head, head_dim]`.
    """
    block_size = vllm_config.cache_config.block_size
    if cache.device.type == "cpu":
        num_blocks, num_heads = cache.shape[:2]
        head_dim = cache.shape[-1] // 2
        halves = cache.view(num_blocks, num_heads, 2, block_size * head_dim)
        keys = halves[:, :, 0].view(num_blocks, num_heads, head_dim, block_size).transpose(2, 3)
        values = halves[:, :, 1].view(num_blocks, num_heads, block_size, head_dim)
        return KVView(keys, values, rope)
    if cache.dim() != 5 or 2 not in cache.shape[:2]:
        raise ValueError(f"a KV cache of shape {tuple(cache.shape)} on {cache.device} is no layout known here")
    keys, values = cache.unbind(0 if cache.shape[0] == 2 else 1)
    return KVView(keys.transpose(1, 2), values.transpose(1, 2), rope)
