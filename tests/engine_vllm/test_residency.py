"""What is remembered of sources and leases, on vLLM's block pool alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spanflow.engine.protocol import Lease

pytestmark = pytest.mark.vllm


def residency(clock: Any = None) -> Any:
    """On a pool of five blocks, one of which is vLLM's null block."""
    from vllm.v1.core.block_pool import BlockPool

    from spanflow.engine.vllm.residency import Residency

    pool = BlockPool(5, enable_caching=True, hash_block_size=16)
    return Residency(pool, clock) if clock is not None else Residency(pool)


def kept(found: Any, tokens: tuple[int, ...], lease: Lease | None = None, lease_id: object = None) -> Any:
    """The tail of a request that has just ended with these tokens behind one prefix."""
    (block,) = found.pool.get_new_blocks(1)
    found.keep(b"prefix", tokens, block, lease, lease_id)
    return found.tail(b"prefix", tokens)


def test_of_two_tails_the_one_with_the_least_behind_is_taken() -> None:
    """The longer one is another answer's, which its own reader will want."""
    found = residency()
    long, short = kept(found, (1, 2, 3)), kept(found, (1, 2))
    assert found.tail(b"prefix", (1,)) is short
    assert found.tail(b"prefix", (1, 2, 3)) is long
    assert found.tail(b"prefix", (2,)) is None
    assert found.tail(b"other", (1,)) is None


def test_a_lease_ends_with_its_last_consumer() -> None:
    found = residency()
    tail = kept(found, (1, 2), Lease(consumers=2))
    found.consume(tail)
    assert tail.alive
    found.consume(tail)
    assert not tail.alive
    assert not found.leases
    # Its block is reused first.
    assert found.pool.get_new_blocks(1) == [tail.block]


def test_a_source_has_no_last_consumer() -> None:
    found = residency()
    tail = kept(found, (1, 2))
    for _ in range(3):
        found.consume(tail)
    assert tail.alive


def test_a_lease_ends_when_its_time_is_over() -> None:
    now = SimpleNamespace(time=100.0)
    found = residency(lambda: now.time)
    tail, source = kept(found, (1, 2), Lease(seconds=5)), kept(found, (3,))
    now.time = 104.0
    found.expire()
    assert tail.alive
    now.time = 105.0
    found.expire()
    assert (tail.alive, source.alive) == (False, True)


def test_a_lease_is_released_by_its_name() -> None:
    found = residency()
    tails = [kept(found, (number,), Lease(), number) for number in range(2)]
    found.release(1)
    assert [tail.alive for tail in tails] == [True, False]


def test_pressure_takes_a_tail_and_it_is_known() -> None:
    """Nothing pins it: the pool hands its block out when there is no other, and nobody finds it there any more."""
    found = residency()
    tail = kept(found, (1, 2), Lease())
    assert tail.block not in found.pool.get_new_blocks(3)
    assert tail.alive
    assert found.pool.get_new_blocks(1) == [tail.block]
    assert not tail.alive
    assert found.tail(b"prefix", (1, 2)) is None
    assert not found.leases


def test_what_was_pinned_is_handed_out_last_and_its_end_first() -> None:
    """A prefix is of use without what follows it, and not the other way round."""
    found = residency()
    blocks = found.pool.get_new_blocks(2)
    for number, block in enumerate(blocks):
        block.set_block_hash(bytes([number]))
    found.unpin(blocks)
    assert found.pool.free_block_queue.get_all_free_blocks()[2:] == blocks[::-1]


def test_a_tail_that_was_pinned_tells_when_it_is_reused() -> None:
    found = residency()
    tail = kept(found, (1, 2))
    found.pin([tail.block])
    found.unpin([tail.block])
    assert tail.alive
    found.pool.get_new_blocks(4)
    assert not tail.alive


def test_memory_of_what_was_here_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from spanflow.engine.vllm import residency as module

    monkeypatch.setattr(module, "_REMEMBERED", 2)
    found = residency()
    for source in ("a", "b", "a", "c"):
        found.seen.keep(source, None)
    assert list(found.seen) == ["a", "c"]


def test_memory_of_what_was_taken_over_is_bounded() -> None:
    from spanflow.engine.vllm.copies import Copies, Relocated

    found = residency()
    copies = Copies(found.pool, found.by_block)
    for number in range(7):
        copies.relocated.keep(number, Relocated(0, 1, (), (), 0, 0, 0))
    assert list(copies.relocated) == [2, 3, 4, 5, 6]


def test_nobody_finds_what_was_disowned() -> None:
    """Full blocks by their hashes, an unfilled one by its tokens; once free, they are handed out next."""
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    found = residency()
    (full,) = found.pool.get_new_blocks(1)
    found.pool._insert_block_hash(make_block_hash_with_group_id(b"full", 0), full, 16)
    tail = kept(found, (1, 2), Lease())
    found.pin([tail.block])
    assert found.cached([b"full"]) == [full]
    found.disown([full, tail.block])
    assert found.cached([b"full"]) is None
    assert found.tail(b"prefix", (1, 2)) is None
    assert not found.by_block
    assert not found.leases
    found.unpin([full, tail.block])
    assert {block.block_id for block in found.pool.get_new_blocks(2)} == {full.block_id, tail.block.block_id}


def test_memory_of_inner_prompts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    from spanflow.engine.vllm import residency as module

    monkeypatch.setattr(module, "_REMEMBERED", 2)
    found = residency()
    for number in range(4):
        found.inner_prompts.keep(("salt", None, bytes([number])), None)
    assert list(found.inner_prompts) == [("salt", None, b"\x02"), ("salt", None, b"\x03")]


def test_nothing_is_kept_of_tails_that_are_gone() -> None:
    found = residency()
    tails = [kept(found, (number,), Lease()) for number in range(3)]
    for tail in tails:
        found.end(tail)
        found.end(tail)
    assert (found.tails, found.by_block, found.leases) == ({}, {}, {})
    assert found.pool.get_num_free_blocks() == 4


def test_a_reset_forgets_all_tails() -> None:
    """vLLM resets a pool nobody holds a block of, and tells whoever keeps one."""
    found = residency()
    kept(found, (1,)), kept(found, (2,), Lease())
    assert found.pool.reset_prefix_cache()
    assert (found.tails, found.by_block, found.leases) == ({}, {}, {})


@pytest.mark.parametrize("what", ["salt", "adapter", "spans", "prefix"])
def test_tails_of_others_are_other_tails(what: str) -> None:
    """A tail has no hash in the pool, so its key says what a block's hash says: whose it is, and what stands before."""
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from spanflow.engine.vllm.contract import LoRARequest, get_hash_fn_by_name
    from spanflow.engine.vllm.hashing import Hashing
    from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)

    def key(other: str, length: int) -> bytes:
        tenant: Any = SimpleNamespace(
            cache_salt="b" if other == "salt" else "a",
            lora_request=LoRARequest("blue" if other == "adapter" else "red", 1, "/red"),
            mm_features=[],
            prompt_embeds=None,
        )
        tokens = (9 if other == "prefix" else 1, *range(length))
        spans = (Span(length - 2, length, NO_ANCHOR),) if other == "spans" else ()
        return Hashing(16, hash_fn).source_keys(tenant, SpanPrompt(tokens, spans)).tail_key

    # A short one has no block before it, whose hash would tell tenants apart.
    length = 20 if what == "prefix" else 10
    assert key("", length) == key("", length)
    assert key(what, length) != key("", length)


def test_what_has_ended_ends_once() -> None:
    """Its block is somebody else's since, and stays where it stands in the order of eviction."""
    found = residency()
    tail = kept(found, (1,), Lease())
    found.end(tail)
    for content in (b"a", b"b"):
        (block,) = found.pool.get_new_blocks(1)
        block.set_block_hash(content)
        found.pool.free_block_queue.append(block)
        block.ref_cnt = 0
    order = [block.block_id for block in found.pool.free_block_queue.get_all_free_blocks()]
    found.end(tail)
    found.consume(tail)
    assert [block.block_id for block in found.pool.free_block_queue.get_all_free_blocks()] == order
