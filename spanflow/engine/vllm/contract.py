"""Every name of vLLM that spanflow uses, in one place, with the range of versions it was read and run against.

vLLM is extended, not changed: by a scheduler class and a KV connector. Both interfaces may move from
one minor version to the next, so each class and attribute used stands here, and `check()` compares
them with the installed vLLM when an engine starts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from prometheus_client import Counter as PromCounter
from vllm import AsyncEngineArgs, SamplingParams
from vllm.config import (
    AuxOutputConfig,
    CacheConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.exceptions import VLLMClientError
from vllm.inputs import TokensPrompt
from vllm.logprobs import Logprob
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    hash_block_tokens,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, RequestQueue
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from spanflow.errors import EngineUnavailable
from spanflow.installing import is_vllm_known, vllm_and_range

#: Names of classes, private ones too: methods, properties, fields, members. Here and below, names stand between spaces.
NAMES: dict[type, str] = {
    AsyncEngineArgs: "async_scheduling create_engine_config create_model_config",
    AsyncLLM: "abort from_engine_args generate get_tokenizer reset_prefix_cache shutdown",
    AsyncScheduler: (
        "add_request finish_requests reset_prefix_cache schedule update_from_output _free_blocks _preempt_request"
    ),
    AttentionBackend: "get_name",
    AuxOutputConfig: "enabled",
    BlockPool: "evict_blocks free_blocks get_cached_block get_num_free_blocks touch unpin_blocks",
    CacheConfig: "block_size cache_dtype enable_prefix_caching get_resolved_kv_cache_layout prefix_caching_hash_algo",
    CompletionOutput: "finish_reason logprobs text token_ids",
    EngineCoreOutput: "kv_transfer_params prefill_stats request_id",
    EngineCoreOutputs: "finished_requests outputs",
    Executor: "get_class",
    FCFSRequestQueue: "index insert",
    FreeKVCacheBlockQueue: "iter_blocks_after prepend_n remove",
    FullAttentionSpec: (
        "attention_chunk_size block_size dtype head_size num_kv_heads sliding_window state_content_bytes"
    ),
    InprocClient: "shutdown",
    KVCacheBlock: "block_hash block_id is_null ref_cnt",
    KVCacheBlocks: "blocks get_block_ids",
    KVCacheConfig: "kv_cache_groups",
    KVCacheCoordinator: "allocate_new_computed_blocks",
    KVCacheGroupSpec: "kv_cache_spec",
    KVCacheLayout: "is_block_compact",
    KVCacheManager: "allocate_slots free get_blocks get_computed_blocks record_prefix_cache_stats",
    KVConnectorBase_V1: (
        "build_connector_meta build_kv_connector_stats build_prom_metrics build_connector_worker_meta "
        "get_kv_connector_stats get_num_new_matched_tokens register_kv_caches requires_kv_delivery save_kv_layer "
        "start_load_kv update_connector_output update_state_after_alloc wait_for_layer_load wait_for_save "
        "_get_connector_metadata"
    ),
    KVConnectorOutput: "kv_connector_worker_meta",
    KVConnectorStats: "aggregate data is_empty reduce reset",
    KVConnectorWorkerMetadata: "aggregate",
    KVEventsConfig: "enable_kv_cache_events",
    KVTransferConfig: "kv_connector_extra_config",
    LLMEngine: "abort_request add_request get_tokenizer has_unfinished_requests reset_prefix_cache step",
    LoRARequest: "lora_name",
    Logprob: "logprob",
    ModelConfig: (
        "dtype get_and_verify_max_len get_head_size get_num_kv_heads get_num_layers get_vocab_size hf_config "
        "hf_text_config is_encoder_decoder max_model_len use_mla uses_mrope"
    ),
    ParallelConfig: "decode_context_parallel_size enable_dbo pipeline_parallel_size prefill_context_parallel_size",
    PauseState: "UNPAUSED",
    Platform: "is_cpu",
    PrefillStats: "num_computed_tokens set",
    Request: "num_output_tokens num_tokens update_block_hashes",
    RequestOutputKind: "DELTA",
    RequestQueue: "add_request prepend_request remove_request",
    RequestStatus: "FINISHED_ABORTED PREEMPTED RUNNING WAITING",
    SamplingParams: "extra_args max_tokens prompt_logprobs structured_outputs",
    SchedulerConfig: "async_scheduling long_prefill_token_threshold",
    SchedulerInterface: "has_requests",
    SchedulerOutput: "has_sync_kv_loads num_scheduled_tokens total_num_scheduled_tokens",
    SupportsHMA: "request_finished_all_groups",
    VllmConfig: (
        "aux_output_config cache_config kv_events_config kv_transfer_config model_config parallel_config "
        "scheduler_config speculative_config"
    ),
}

#: Names that only instances have: looked for where one comes to hand.
INSTANCE_NAMES: dict[type, str] = {
    AsyncLLM: "model_config output_handler vllm_config",
    AsyncScheduler: (
        "block_size connector grammar_compile_error_reqs hash_block_size kv_cache_config kv_cache_manager "
        "kv_holding_waiting max_model_len max_num_active_reqs max_num_scheduled_tokens pause_state requests "
        "running scheduler_config vllm_config waiting"
    ),
    BlockPool: "blocks free_block_queue num_gpu_blocks",
    EngineCore: "scheduler",
    InprocClient: "engine_core",
    KVCacheCoordinator: "single_type_managers",
    KVCacheManager: "block_pool coordinator watermark_blocks",
    KVConnectorBase_V1: "_kv_cache_config _vllm_config",
    LLMEngine: "engine_core model_config vllm_config",
    ModelConfig: "runner_type",
    Request: (
        "all_token_ids arrival_time block_hashes cache_salt client_index lora_request mm_features "
        "num_computed_tokens num_output_placeholders num_preemptions num_prompt_tokens prefill_stats priority "
        "prompt_embeds prompt_token_ids request_id resumable sampling_params skip_reading_prefix_cache status "
        "_block_hasher"
    ),
    RequestOutput: "finished kv_transfer_params num_cached_tokens outputs request_id",
    SingleTypeKVCacheManager: "block_size req_to_blocks",
}

#: Parameters that are given by name.
PARAMETERS: dict[Callable[..., Any], str] = {
    AsyncEngineArgs: (
        "block_size disable_log_stats distributed_executor_backend dtype enable_lora enable_prefix_caching "
        "enforce_eager kv_cache_memory_bytes kv_transfer_config max_lora_rank max_loras max_model_len model "
        "pipeline_parallel_size scheduler_cls tensor_parallel_size use_tqdm_on_load"
    ),
    AsyncLLM.generate: "lora_request priority",
    AsyncLLM.reset_prefix_cache: "reset_running_requests",
    KVCacheManager.allocate_slots: (
        "delay_cache_blocks has_scheduled_reqs new_computed_blocks num_external_computed_tokens num_new_computed_tokens"
    ),
    KVConnectorStats: "data",
    KVTransferConfig: "kv_connector kv_connector_extra_config kv_connector_module_path kv_role",
    LLMEngine: "log_stats multiprocess_mode",
    LLMEngine.add_request: "lora_request priority",
    LLMEngine.reset_prefix_cache: "reset_running_requests",
    Request: (
        "arrival_time block_hasher cache_salt client_index lora_request pooling_params priority prompt_token_ids "
        "request_id sampling_params"
    ),
    SamplingParams: (
        "detokenize extra_args ignore_eos logprobs max_tokens output_kind seed stop structured_outputs temperature "
        "top_p"
    ),
    StructuredOutputsParams: "json",
    TokensPrompt: "cache_salt prompt_token_ids",
    get_tokenizer: "revision",
}

#: What is set on instances; nothing is ever set on a class or module of vLLM.
ASSIGNED: dict[type, str] = {
    EngineCoreOutput: "kv_transfer_params",  # the report of a span request
    EngineCoreOutputs: "finished_requests outputs",  # without those of internal requests
    KVConnectorStats: "data",  # our own subclass's
    Request: "_block_hasher arrival_time num_computed_tokens priority",
    SchedulerConfig: "async_scheduling",  # before an engine in this process is made
    SchedulerOutput: "has_sync_kv_loads",
}


def _label(owner: Any) -> str:
    return str(getattr(owner, "__qualname__", type(owner).__qualname__))


def _missing(owner: Any, names: str) -> list[str]:
    """What a class, or an instance, lacks. A field without a default is only annotated."""
    kinds = owner.__mro__ if isinstance(owner, type) else ()
    fields = {name for kind in kinds for name in inspect.get_annotations(kind)}
    return [f"{_label(owner)}.{name}" for name in names.split() if name not in fields and not hasattr(owner, name)]


def _missing_parameters(function: Callable[..., Any], names: str) -> list[str]:
    is_typed_dict = isinstance(function, type) and issubclass(function, dict)
    known = function.__annotations__ if is_typed_dict else inspect.signature(function).parameters
    return [f"parameter {name} of {_label(function)}" for name in names.split() if name not in known]


def _missing_of_instance(instance: Any) -> list[str]:
    """What an instance lacks of all that is listed for its class and the bases of it."""
    tables = [names for owner, names in INSTANCE_NAMES.items() if isinstance(instance, owner)]
    return [name for names in tables for name in _missing(instance, names)]


def check() -> None:
    """Compare version, classes and parameters with what is used. Raises EngineUnavailable that lists what differs."""
    missing = [name for owner, names in NAMES.items() for name in _missing(owner, names)]
    missing += [name for function, names in PARAMETERS.items() for name in _missing_parameters(function, names)]
    if missing or not is_vllm_known():
        raise EngineUnavailable(
            vllm_and_range()
            + (f", and these names are gone: {', '.join(missing)}" if missing else "")
            + ". Install a version in that range, or open the session with engine='oracle'."
        )
    _check_instances(
        Request("probe", [0], SamplingParams(max_tokens=1), None),
        RequestOutput("probe", None, None, None, [], True),
    )


def check_scheduler(scheduler: AsyncScheduler) -> None:
    """The same for a scheduler and what it consists of. Raises EngineUnavailable."""
    _check_instances(scheduler)
    manager = scheduler.kv_cache_manager
    _check_instances(manager, scheduler.connector, scheduler.vllm_config.model_config)
    _check_instances(manager.block_pool, manager.coordinator)
    _check_instances(*manager.coordinator.single_type_managers)


def check_client(engine: AsyncLLM | LLMEngine) -> None:
    """The same for an engine, and for its core where that is in this process. Raises EngineUnavailable."""
    _check_instances(engine)
    if isinstance(engine, LLMEngine):
        _check_instances(engine.engine_core)
        _check_instances(engine.engine_core.engine_core)


def _check_instances(*instances: Any) -> None:
    missing = [name for instance in instances for name in _missing_of_instance(instance)]
    if missing:
        raise EngineUnavailable(
            f"vLLM lacks what spans use: {', '.join(missing)}. {vllm_and_range()}: install a version in that range."
        )


__all__ = [
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncScheduler",
    "BlockHash",
    "BlockPool",
    "CompletionOutput",
    "EngineCoreOutputs",
    "EngineDeadError",
    "Executor",
    "FCFSRequestQueue",
    "FullAttentionSpec",
    "InprocClient",
    "KVCacheBlock",
    "KVCacheBlocks",
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
    "RequestOutput",
    "RequestOutputKind",
    "RequestStatus",
    "SamplingParams",
    "SchedulerOutput",
    "StructuredOutputsParams",
    "SupportsHMA",
    "TokensPrompt",
    "VLLMClientError",
    "VllmConfig",
    "check",
    "check_client",
    "check_scheduler",
    "current_platform",
    "ensure_kv_transfer_shutdown",
    "generate_block_hash_extra_keys",
    "get_current_attn_backends",
    "get_hash_fn_by_name",
    "get_tokenizer",
    "hash_block_tokens",
]
