"""The engine arguments that a session gives to vLLM, and those that it can't take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from spanflow.engine.environment import quiet_start
from spanflow.engine.tokenizer import tokenizer_source
from spanflow.engine.vllm.contract import (
    AsyncEngineArgs,
    KVTransferConfig,
    VLLMClientError,
    current_platform,
    get_tokenizer,
)
from spanflow.errors import ModelError, QueryError

#: How vLLM says that it does not want what it was given.
REFUSALS = (ValueError, VLLMClientError)


def is_cpu() -> bool:
    """Whether vLLM runs on the CPU here."""
    return bool(current_platform.is_cpu())


def span_arguments(headers: list[list[int]], audit_steps: bool, own_process: bool = False) -> dict[str, Any]:
    """The engine arguments that put the span scheduler and its connector into vLLM; with `own_process` its process ends
    with the one that started it."""
    return {
        "scheduler_cls": "spanflow.engine.vllm.scheduler.SpanScheduler",
        "kv_transfer_config": KVTransferConfig(
            kv_connector="SpanConnector",
            kv_connector_module_path="spanflow.engine.vllm.connector",
            # A producer: as a consumer vLLM would defer the frees of all requests.
            kv_role="kv_producer",
            kv_connector_extra_config={"headers": headers, "audit_steps": audit_steps, "own_process": own_process},
        ),
    }


#: Engine arguments that carry spans, or that `VllmEngine.start` has other names for.
_OURS = {
    "scheduler_cls": "spans need a scheduler of their own",
    "kv_transfer_config": "spans need a connector of their own, and vLLM takes one",
    "enable_prefix_caching": "spans live in the prefix cache",
    "kv_cache_memory_bytes": "say kv_cache_gib",
    "model": "it is the session's first argument",
    "enable_lora": "say adapters",
}
#: The same for all whose names begin so.
_ALL_OURS = {
    "data_parallel": "a session has one engine core, and one cache",
    "kv_offloading": _OURS["kv_transfer_config"],
    "max_num_queued": "say max_concurrency",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse what is no engine argument of vLLM, and what spans need for themselves. Raises QueryError."""
    for name in options:
        alike = (why for begin, why in _ALL_OURS.items() if name.startswith(begin))
        if why := _OURS.get(name) or next(alike, ""):
            raise QueryError(f"engine 'vllm': option {name!r} can't be given: {why}")
    known = {field.name for field in fields(AsyncEngineArgs)}
    unknown = sorted(options.keys() - known)
    if unknown:
        close = get_close_matches(unknown[0], known, 3)
        raise QueryError(
            f"engine 'vllm' has no option {', '.join(map(repr, unknown))}; its options: block_size, kv_cache_gib, "
            "cpu_kv_cache_gib, max_model_len, adapters, and vLLM's engine arguments"
            + (f" (is {' or '.join(map(repr, close))} meant?)" if close else "")
        )


def load_vllm_tokenizer(arguments: Mapping[str, Any]) -> Any:
    """The tokenizer that vLLM loads by itself for these engine arguments. Raises ModelError."""
    model = str(arguments["model"])
    source = tokenizer_source(model, arguments)
    try:
        return get_tokenizer(source.place, revision=source.revision, **source.options)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the tokenizer of {model} can't be loaded from {source.place}: {error}") from error


def with_window(arguments: Mapping[str, Any]) -> AsyncEngineArgs:
    """vLLM's arguments. A window of -1 is as much of the model's own as the KV cache holds; where the model names none
    that can't be told, and vLLM has a number of its own."""
    args = AsyncEngineArgs(**arguments)
    if arguments.get("max_model_len") == -1 and args.create_model_config().max_model_len < 1:
        return AsyncEngineArgs(**{**arguments, "max_model_len": None})
    return args


def too_little_kv(arguments: Mapping[str, Any]) -> str:
    """That the KV of one prompt of the window does not fit where it was to go, in numbers, or ''. Loads the config."""
    room = arguments.get("kv_cache_memory_bytes")
    try:
        with quiet_start():
            config = with_window(arguments).create_engine_config()
    except Exception:  # noqa: BLE001 - then that is what is wrong, and is said already
        return ""
    model, parallel, size = config.model_config, config.parallel_config, config.cache_config.block_size
    if room is None or model.use_mla:
        return ""
    dtype = config.cache_config.cache_dtype
    itemsize = model.dtype.itemsize if dtype == "auto" else 1 if dtype.startswith("fp8") else 2
    per_block = 2 * size * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    per_block *= itemsize
    fits = max(0, room // per_block - 1) * size  # one block is vLLM's own
    window = 1 if arguments["max_model_len"] == -1 else model.max_model_len
    if window <= fits:
        return ""
    return (
        f"{room / (1 << 30):.2f} GiB of KV cache hold {fits} tokens, where each layer has full attention, "
        f"and the window is to be {window}: raise "
        "kv_cache_gib, or lower max_model_len (left out, it is what fits)"
    )
