"""Where K and V lie in the caches that vLLM hands to a worker: written by its backends, moved by ours."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the vllm tier needs torch")

from spanflow.kernels.slots import Move  # noqa: E402

pytestmark = pytest.mark.vllm

HEADS, DIMS = 2, 64
LAYERS = ("model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
ORDERS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC")
#: Backends, the orders in memory that they choose from, and a size of blocks. FlashInfer's kernels make two of 128.
KNOWN = [
    ("CPU_ATTN", "LBHNC", 64),
    ("FLEX_ATTENTION", "LBNHC", 64),
    *(("FLASHINFER", order, 128 if order[0] == "L" else 64) for order in ORDERS),
    *((name, order, 64) for name in ("FLASH_ATTN", "TRITON_ATTN") for order in ORDERS),
]


def full(block_size: int = 64, **options: Any) -> Any:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    shape = {"num_kv_heads": HEADS, "head_size": DIMS, "dtype": torch.float32}
    return FullAttentionSpec(block_size=block_size, **shape | options)


def numbers(seed: int, num_tokens: int) -> torch.Tensor:
    return torch.randn(num_tokens, HEADS, DIMS, generator=torch.Generator().manual_seed(seed))


def rotated(keys: torch.Tensor, delta: int) -> torch.Tensor:
    """By the definition: pairs of dimensions as complex numbers, each turned by its own frequency."""
    angle = delta / 10_000 ** (torch.arange(0, DIMS, 2, dtype=torch.float64) / DIMS)
    turned = torch.complex(*keys.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag), -1).to(keys.dtype)


def run(connector: Any, **step: Any) -> Any:
    """What the worker does at the beginning of a step, and what it answers."""
    from spanflow.engine.vllm.connector import StepMoves

    connector.bind_connector_metadata(StepMoves(**step))
    connector.start_load_kv(None)
    return connector.build_connector_worker_meta()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("name", "order", "size"), KNOWN)
def test_what_is_moved_is_what_the_backend_would_have_written(name: str, order: str, size: int, in_place: bool) -> None:
    """Every number of the caches, with moves from block to block and inside the same blocks."""
    from vllm_caches import backend, made_for, write

    kind, count, delta = backend(name), 60, -93
    connector, caches = made_for([(full(size), LAYERS)], kind, order)
    connector.register_kv_caches(caches)
    assert connector.unsupported == ""
    assert {cache.shape[2] for cache in caches.values()} == {64}
    blocks, offset = ((3, 1), size - 30) if in_place else ((2, 4), 7)
    source = torch.tensor([*range(4 * size - 33, 4 * size), *range(size, size + 27)])
    target = (torch.arange(count) + offset) // size
    target = torch.tensor(blocks)[target] * size + (torch.arange(count) + offset) % size
    wanted = []
    for layer, cache in enumerate(caches.values()):
        keys, values = numbers(layer, count), numbers(10 + layer, count)
        write(kind, cache, source, keys, values)
        wanted.append(cache.clone())
        write(kind, wanted[-1], target, rotated(keys, delta), values)
        assert not torch.equal(cache, wanted[-1])
    run(connector, moves=[Move((3, 1), size - 33, blocks, offset, count, delta)], in_place=in_place)
    for cache, moved in zip(caches.values(), wanted, strict=True):
        torch.testing.assert_close(cache, moved, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "order", "size"), KNOWN)
def test_a_probe_reads_the_keys_that_the_backend_wrote(name: str, order: str, size: int) -> None:
    from vllm_caches import backend, made_for, write

    kind = backend(name)
    connector, caches = made_for([(full(size), LAYERS)], kind, order)
    connector.register_kv_caches(caches)
    keys, slots = numbers(0, 30), torch.arange(size - 20, size + 10)
    for cache in caches.values():
        write(kind, cache, slots, keys, numbers(1, 30))
        write(kind, cache, slots + 3 * size, rotated(keys, 200), numbers(2, 30))
    pairs = [(int(slot), int(slot) + 3 * size, 200) for slot in slots]
    assert run(connector, probes=pairs).unsupported == ""
    assert "differs by" in run(connector, probes=[*pairs[:-1], (*pairs[-1][:2], 201)]).unsupported


def test_a_key_that_is_no_number_is_found_among_others() -> None:
    from vllm_caches import backend, made_for, write

    kind = backend("FLASH_ATTN")
    connector, caches = made_for([(full(), LAYERS)], kind, "LBNHC")
    connector.register_kv_caches(caches)
    keys = numbers(0, 3)
    keys[1, 0, 5] = torch.nan
    write(kind, caches[LAYERS[0]], torch.arange(3), keys, keys)
    assert "differs by" in run(connector, probes=[(slot, slot, 0) for slot in range(3)]).unsupported


def kinds() -> dict[str, tuple[Any, ...]]:
    """Kinds of KV that can't be moved: groups of layers, each with its spec, and why. Pages are of one size."""
    from vllm.v1 import kv_cache_interface as vllm

    shape = {"block_size": 64, "num_kv_heads": HEADS, "head_size": DIMS, "dtype": torch.float32}
    state = vllm.MambaSpec(block_size=64, shapes=((HEADS * DIMS, 100), (DIMS, 56)), dtypes=(torch.float32,) * 2)
    window = vllm.SlidingWindowSpec(**shape, sliding_window=128)
    first, second = ((name,) for name in LAYERS)
    wide = vllm.UniformTypeKVCacheSpecs(
        block_size=64, kv_cache_specs={LAYERS[0]: full(), LAYERS[1]: full(head_size=2 * DIMS)}
    )
    return {
        "state space": ([(state, LAYERS)], "MambaSpec, not full attention"),
        "full attention and state space": ([(full(), first), (state, second)], "2 kinds of KV cache"),
        "full attention and a window": ([(full(), first), (window, second)], "2 kinds of KV cache"),
        "a window": ([(window, LAYERS)], "SlidingWindowSpec, not full attention"),
        "a window that is managed as full attention": ([(full(sliding_window=9), LAYERS)], "in a sliding window"),
        "chunks": ([(vllm.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=128), LAYERS)], "ChunkedLocal"),
        "a latent": ([(vllm.MLAAttentionSpec(**shape), LAYERS)], "MLAAttentionSpec"),
        "cross attention": ([(full(), first), (vllm.CrossAttentionSpec(**shape), second)], "2 kinds of KV cache"),
        "heads of two sizes": ([(wide, LAYERS)], "UniformTypeKVCacheSpecs"),
        "values that are shorter than keys": ([(full(head_size_v=32), LAYERS)], "is of shape"),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "state space",
        "full attention and state space",
        "full attention and a window",
        "a window",
        "a window that is managed as full attention",
        "chunks",
        "a latent",
        "cross attention",
        "heads of two sizes",
        "values that are shorter than keys",
    ],
)
def test_what_can_t_be_moved_is_a_reason_and_no_error(kind: str) -> None:
    """A worker that raised here would keep the engine from starting."""
    from vllm_caches import backend, made_for

    groups, reason = kinds()[kind]
    connector, caches = made_for(groups, backend("FLASH_ATTN"), "LBNHC")
    connector.register_kv_caches(caches)
    assert reason in run(connector, probes=[(0, 1, 1)]).unsupported


@pytest.mark.parametrize(
    ("name", "order", "options", "reason"),
    [
        ("CUSTOM", "LBNHC", {}, r"its attention backend \(CUSTOM\) lays KV out"),
        # As on ROCm where K and V have a plane each; with two heads the shape is that of one row per token.
        ("FLASH_ATTN", "LBHNC", {"num_head_slots": 2, "state_content_bytes": HEADS * DIMS * 4}, "lays KV out"),
        ("FLASH_ATTN", "LHBNC", {}, "laid out as KVCacheLayout.LHBNC"),
        ("FLASH_ATTN", "BHLNC", {}, "laid out as KVCacheLayout.BHLNC"),
    ],
)
def test_layouts_that_are_not_known_are_not_guessed(
    name: str, order: str, options: dict[str, Any], reason: str
) -> None:
    from vllm_caches import backend, made_for

    kind = type("Other", (backend("FLASH_ATTN"),), {"get_name": staticmethod(lambda: name)})
    connector, caches = made_for([(full(**options), LAYERS)], kind, order)
    connector.register_kv_caches(caches)
    assert re.search(reason, run(connector, probes=[(0, 1, 1)]).unsupported)


def test_quantised_kv_is_a_reason() -> None:
    from vllm_caches import backend, made_for

    connector, caches = made_for([(full(dtype=torch.uint8), LAYERS)], backend("CPU_ATTN"), "LBHNC")
    connector._vllm_config.cache_config.cache_dtype = "fp8"
    connector.register_kv_caches(caches)
    assert "quantised (fp8)" in run(connector, probes=[(0, 1, 1)]).unsupported


def test_two_backends_in_one_model_are_a_reason() -> None:
    from vllm_caches import backend, made_for

    connector, caches = made_for([(full(), LAYERS)], backend("FLASH_ATTN"), "LBNHC")
    layer = connector._vllm_config.compilation_config.static_forward_context[LAYERS[1]]
    layer.get_attn_backend = lambda: backend("CPU_ATTN")
    connector.register_kv_caches(caches)
    assert "(CPU_ATTN, FLASH_ATTN) lays KV out" in run(connector, probes=[(0, 1, 1)]).unsupported


def test_of_several_workers_the_one_that_can_t_counts() -> None:
    from spanflow.engine.vllm.connector import StepResult

    able, unable = StepResult(5), StepResult(3, "a reason")
    assert able.aggregate(unable) == unable.aggregate(able) == StepResult(5, "a reason")
