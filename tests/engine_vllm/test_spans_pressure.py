"""A small pool of an engine in its own process: eviction, pressure, parents that do not fit together, many orders."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from vllm_rig import Judge, Rig, generate_candidates

from spanflow.lowering.prompt import SpanPrompt

pytestmark = pytest.mark.vllm

#: Bytes of KV per block of 32 tokens of the default model in float32: 30 layers, K and V, 3 heads of 64.
_BLOCK_BYTES = 30 * 2 * 3 * 64 * 4 * 32


#: vLLM's own options, which cut prompts and change their order.
_SETTINGS = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 32,
    "scheduling_policy": "priority",
    "long_prefill_token_threshold": 40,
}


@pytest.fixture(scope="module")
def rig(start_rig: Any, request: pytest.FixtureRequest) -> Rig:
    """64 blocks, 2,048 tokens."""
    pool = (65 * _BLOCK_BYTES + 4096) / (1 << 30)
    rig: Rig = start_rig(max_model_len=1024, kv_cache_gib=pool, **getattr(request, "param", {}))
    return rig


def test_pressure_at_twice_the_pool(rig: Rig, judge: Judge) -> None:
    """Documents of twice the pool, used again and again: some are evicted, all answers are right."""
    documents = [rig.document(n, 5) for n in range(40)]
    assert sum(map(len, documents)) > 2 * 32 * rig.audit()["blocks"]
    order = random.Random(5)
    prompts = [rig.prompt(order.sample(documents, 3), f"Q{n}?", repair=4) for n in range(12)]
    answers = [rig.one(prompt) for prompt in prompts] + rig.ask(*prompts[::-1])
    judge.check(*answers)
    assert "evicted" in {status for answer in answers for status in answer.statuses}


def test_two_parents_that_together_exceed_the_pool_both_finish(rig: Rig, judge: Judge) -> None:
    prompts = [rig.prompt([rig.document(n * 5 + k, 6) for k in range(4)], f"Q{n}?", repair=6) for n in range(3)]
    needed = [2 * len(prompt) / 32 for prompt in prompts]
    assert sum(needed[:2]) > rig.audit()["blocks"]
    judge.check(*rig.ask(*prompts, max_tokens=4))


def test_what_fits_once_is_moved_in_place(rig: Rig, judge: Judge) -> None:
    """Prompt and sources do not fit together: sources that nobody else uses become the prompt, shifted and rotated."""
    documents = [rig.document(n, 8) for n in range(5)]
    prompt = rig.prompt(documents, repair=4)
    assert sum(-(-(len(d) + 3) // 32) for d in documents) + -(-len(prompt) // 32) > rig.audit()["blocks"]
    before = rig.audit().get("taken_over", 0)
    answers = [rig.one(prompt), rig.one(rig.prompt(documents[::-1], repair=4)), rig.one(prompt)]
    judge.check(*answers)
    assert all("unsupported" not in answer.statuses for answer in answers)
    assert any("in place" in span.why for span in answers[0].spans)
    assert rig.audit()["taken_over"] > before
    # What an earlier prompt made of a source is a source as well.
    assert "hit" in answers[1].statuses


def test_spans_that_can_not_fit_run_exactly(rig: Rig, judge: Judge) -> None:
    """The same each time, so that warm and cold agree. Each span takes two blocks, most of them half empty."""
    prompt = rig.prompt([rig.document(n, 2)[:30] for n in range(32)])
    for _ in range(2):
        answer = rig.one(prompt)
        if answer.statuses != ["unsupported"] * 32:
            pytest.fail(f"expected exact execution, got {answer.statuses}")
        assert "the KV pool's" in answer.spans[0].why
        assert judge.distance(answer, SpanPrompt(prompt.token_ids)) < 1e-4


def test_running_answers_are_preempted_under_pressure(rig: Rig, judge: Judge) -> None:
    """Long answers of span requests and plain ones outgrow the pool; vLLM preempts, everybody ends right."""
    before = rig.audit().get("preemptions", 0)
    spans = [rig.prompt([rig.document(n, 4), rig.document(n + 1, 4)], f"Q{n}?", repair=3) for n in range(4)]
    plain = [rig.endless(n) for n in range(10)]

    async def together() -> list[Any]:
        work = [rig.run(p, 180) for p in (*spans, *plain)]
        return list(await asyncio.gather(*work))

    answers = rig.wait(together(), 600)
    judge.check(*answers)
    lengths = [len(answer.token_ids) for answer in answers[len(spans) :]]
    assert lengths == [180] * len(plain), "prompts that should go on for ever did not: this asks too little of the pool"
    assert rig.audit()["preemptions"] > before


def test_leases_yield_to_pressure(rig: Rig, judge: Judge) -> None:
    """A leased block may be taken; then its candidate is computed again, and the report says so."""
    inner = generate_candidates(rig, 3, max_tokens=20)
    assert rig.audit()["leases"] >= 1
    rig.ask(*[rig.endless(n) for n in range(12)], max_tokens=160)
    answer = rig.one(rig.judge(inner))
    assert "evicted" in answer.statuses or "new" in answer.statuses
    judge.check(answer)


def test_one_of_two_sources_is_evicted(rig: Rig, judge: Judge) -> None:
    """d1 goes between its use and the next, while d2 is used on and on: d2 still hits."""
    rig.reset()
    one, two = rig.document(0, 6), rig.document(1, 6)
    judge.check(rig.one(rig.prompt([one, two], repair=4)))
    for number in range(2, 14):
        rig.one(rig.prompt([two, rig.document(number, 6)], repair=4))
    answer = rig.one(rig.prompt([two, one], repair=4))
    assert answer.statuses == ["hit", "evicted"]
    judge.check(answer)


def test_fifty_novel_orders_without_decay(rig: Rig, judge: Judge) -> None:
    """4 of 40 documents in novel orders; the pool holds less than half of them. The hit rate does not fall."""
    rig.reset()
    documents = [rig.document(n, 4) for n in range(40)]
    assert sum(-(-(len(d) + 3) // 32) for d in documents) >= 2 * rig.audit()["blocks"]
    random_orders = random.Random(7)
    orders = [tuple(random_orders.sample(range(40), 4)) for _ in range(50)]
    assert len(set(orders)) == 50
    answers = [rig.one(rig.prompt([documents[n] for n in order])) for order in orders]
    judge.check(*answers[::5])
    hits = [answer.statuses.count("hit") for answer in answers]
    second, last = sum(hits[10:30]), sum(hits[30:])
    assert last >= 0.8 * second > 10, hits


@pytest.mark.parametrize("rig", [_SETTINGS], indirect=True, ids=["settings"])
def test_small_budget_reversed_priorities_and_a_threshold(rig: Rig, judge: Judge) -> None:
    """As options of vLLM's own: the same answers, also of prompts that do not fit together."""
    config = rig.engine._backend.engine.vllm_config.scheduler_config
    assert {name: getattr(config, name.replace("scheduling_", "")) for name in _SETTINGS} == _SETTINGS
    prompts = [rig.prompt([rig.document(n + k, 4) for k in range(3)], f"Q{n}?", repair=30 + n) for n in range(4)]
    assert sum(len(prompt) / 32 for prompt in prompts) > 0.5 * rig.audit()["blocks"]

    async def together() -> list[Any]:
        return list(await asyncio.gather(*(rig.run(p, 2, priority=9 - n) for n, p in enumerate(prompts))))

    judge.check(*rig.wait(together()), *rig.ask(*prompts[::-1]))
    # Ranges of 60 tokens, and of the head before the first one, are cut in two.
    documents = [rig.document(n) for n in (3, 0)]
    rig.one(rig.prompt(documents[::-1]))
    before = rig.audit()["ranges"]
    judge.check(rig.one(rig.prompt(documents, repair=60)))
    assert rig.audit()["ranges"] == before + 4
