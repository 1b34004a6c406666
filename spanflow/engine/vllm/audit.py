"""Recount what vLLM and the span scheduler believe about the block pool; a difference is a fault of ours."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanflow.engine.vllm.scheduler import SpanScheduler


def audit(scheduler: SpanScheduler) -> dict[str, Any]:
    """Counts of requests, families, leases and blocks, and `problems`: sentences, none where all adds up."""
    spans, manager = scheduler.spans, scheduler.kv_cache_manager
    pool = manager.block_pool
    tables = [(n, t) for kind in manager.coordinator.single_type_managers for n, t in kind.req_to_blocks.items()]
    expected = Counter(block.block_id for _, table in tables for block in table if not block.is_null)
    expected.update(block.block_id for block in spans.pinned())
    problems = [
        f"block {block.block_id} has {block.ref_cnt} references, {expected[block.block_id]} are accounted for"
        for block in pool.blocks
        if not block.is_null and block.ref_cnt != expected[block.block_id]
    ]
    free = sum(block.ref_cnt == 0 and not block.is_null for block in pool.blocks)
    if free != pool.get_num_free_blocks():
        problems.append(f"{free} blocks have no reference, the free queue holds {pool.get_num_free_blocks()}")
    live = scheduler.requests.keys()
    problems += [f"block table of {name!r}, which is no request" for name in {name for name, _ in tables} - live]
    problems += [f"held request {name!r} is gone" for name in (spans.held.keys() | spans.connector.held) - live]
    problems += [f"source that {name!r} makes outlived it" for name in {*spans.by_source.values()} - live]
    problems += [f"state of {name!r} outlived it" for name in spans.known.keys() - live - spans.ended]
    problems += [f"internal request {name!r} outlived it" for name in spans.internal.keys() - live - spans.ended]
    problems += [f"family of {name!r} outlived it" for name in spans.family.waiting.keys() - live]
    queued = {id(request) for queue in (scheduler.waiting, scheduler.kv_holding_waiting) for request in queue}
    queued |= {id(request) for request in scheduler.running}
    problems += [f"request {name!r} is in no queue" for name, r in scheduler.requests.items() if id(r) not in queued]
    return {
        "requests": len(live),
        "internal": len(spans.internal.keys() - spans.ended),  # else of an abort, which the next update forgets
        "held": len(spans.held),
        "families": len(spans.family.waiting),
        "pins": len(spans.pinned()),
        "leases": len(spans.residency.leases),
        "blocks_used": pool.num_gpu_blocks - 1 - free,
        "blocks": pool.num_gpu_blocks - 1,
        "unsupported": spans.unsupported,
        "moves_by": spans.connector.moves_by,
        "problems": problems,
    } | spans.counters
