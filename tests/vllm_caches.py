"""The KV caches that vLLM makes for a worker, and what its attention backends write into them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from types import SimpleNamespace as Namespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from vllm_configuration import configuration

#: The modules of attention backends, by what they call themselves.
MODULES = {
    "CPU_ATTN": "cpu_attn",
    "FLASHINFER": "flashinfer",
    "FLASH_ATTN": "flash_attn",
    "FLEX_ATTENTION": "flex_attention",
    "TRITON_ATTN": "triton_attn",
}


@cache
def backend(name: str) -> Any:
    """The class of an attention backend of vLLM. None needs a GPU before it computes."""
    with _flashinfer() if name == "FLASHINFER" else nullcontext():
        module = import_module(f"vllm.v1.attention.backends.{MODULES[name]}")
    (found,) = (
        kind
        for kind in vars(module).values()
        if isinstance(kind, type) and kind.__module__ == module.__name__ and kind.__name__.endswith("Backend")
    )
    assert found.get_name() == name
    return found


@contextmanager
def _flashinfer() -> Iterator[None]:
    """Stands in for the package of that name while vLLM's module is imported that computes by it."""

    class Standin(ModuleType):
        __path__: Sequence[str] = ()

        def __getattr__(self, name: str) -> Any:
            return MagicMock()

    has_flashinfer = import_module("vllm.utils.flashinfer").has_flashinfer
    names = ("flashinfer", "flashinfer.decode", "flashinfer.prefill", "flashinfer.utils")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setitem(sys.modules, name, module := Standin(name))
            module.__spec__ = ModuleSpec(name, None)
        has_flashinfer.cache_clear()
        yield
        sys.modules.pop("vllm.v1.attention.backends.flashinfer", None)
    has_flashinfer.cache_clear()


def made_for(
    groups: Sequence[tuple[Any, Sequence[str]]], kind: Any, layout: str, num_blocks: int = 5
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A connector, and the caches that vLLM makes for `groups` of layers, each with a spec: what a worker begins with.

    `kind` is the class of their attention backend; `layout` names the order in memory, which its backends choose.
    """
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheGroupSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache, customize_attention_spec, prepare_kernel_block_sizes

    from spanflow.engine.vllm.connector import SpanConnector
    from spanflow.engine.vllm.contract import KVConnectorRole

    class Layer(AttentionLayerBase):
        def get_attn_backend(self) -> Any:
            return kind

        def get_kv_cache_spec(self, vllm_config: Any) -> None:
            raise NotImplementedError

    order, config = KVCacheLayout[layout], configuration()
    config.cache_config.get_resolved_kv_cache_layout = lambda: order
    config.compilation_config.static_forward_context = {name: Layer() for _, names in groups for name in names}
    specs = [customize_attention_spec(kind, spec) if isinstance(spec, AttentionSpec) else spec for spec, _ in groups]
    made = [KVCacheGroupSpec(list(names), spec) for (_, names), spec in zip(groups, specs, strict=True)]
    config.cache_config.num_gpu_blocks_override = num_blocks
    cache_config = get_kv_cache_config_from_groups(config, made, 0)
    attention = [[Namespace(backend=kind, kv_cache_spec=spec)] for spec in specs]
    caches = allocate_kv_cache(
        cache_config, torch.device("cpu"), order, prepare_kernel_block_sizes(cache_config, attention)
    )
    return SpanConnector(config, KVConnectorRole.WORKER, cache_config), caches


def write(
    kind: Any, cache: torch.Tensor, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, isa: str = "vec"
) -> None:
    """Let an attention backend write K and V, `[token, head, head_dim]`, into slots of a layer's cache.

    The kernels at the end of this that need a GPU are given views of K and of V, `[block, token, head, head_dim]`.
    """
    from vllm.v1.attention.backend import AttentionType

    impl = Namespace(
        attn_type=AttentionType.DECODER,
        head_size=keys.shape[2],
        kv_cache_dtype="auto",
        cache_dtype="auto",
        kv_sharing_target_layer_name=None,
        nvfp4_fa2=False,
        is_kvcache_nvfp4=False,
        _is_per_token_head_quant=False,
    )
    layer = Namespace(isa=isa, _k_scale=None, _v_scale=None, _k_scale_float=1.0, _v_scale_float=1.0)
    update = kind.get_impl_cls().do_kv_cache_update
    with pytest.MonkeyPatch.context() as patch:
        for name in ("reshape_and_cache_flash", "triton_reshape_and_cache_flash"):
            patch.setitem(update.__globals__, name, _scatter)
        patch.setattr(torch.ops._C_cache_ops, "reshape_and_cache_flash", _scatter, raising=False)
        update(impl, layer, keys, values, cache, slots)


def _scatter(
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> None:
    size = key_cache.shape[1]
    key_cache[slots // size, slots % size] = keys
    value_cache[slots // size, slots % size] = values
