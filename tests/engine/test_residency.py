"""The cache model: what hits, what is computed, what is evicted, in tokens that can be counted by hand."""

from __future__ import annotations

import random
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanflow.engine.blocks import BlockPool, PoolFull, block_keys
from spanflow.engine.protocol import EngineRequest, Lease
from spanflow.engine.residency import Admission, Residency
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

BLOCK = 16
HEADER = SpanPrompt((1, 2, 3))
_names = count()


def ids(num: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(10, 10_000), k=num))


def document(number: int, num_tokens: int = 40) -> tuple[int, ...]:
    return ids(num_tokens, 1000 + number)


def prompt_of(
    *docs: tuple[int, ...],
    head: tuple[int, ...] = (1, 2, 3),
    tail: tuple[int, ...] = (4, 5, 6, 7, 8),
    repair: int = 4,
    anchor: SpanPrompt = HEADER,
) -> SpanPrompt:
    tokens, spans = head, []
    for doc in docs:
        spans.append(Span(len(tokens), len(tokens) + len(doc), anchor, repair))
        tokens += doc
    return SpanPrompt(tokens + tail, tuple(spans))


def request(prompt: SpanPrompt, **options: object) -> EngineRequest:
    return EngineRequest(f"r{next(_names)}", prompt, Sampling(max_tokens=1), **options)  # type: ignore[arg-type]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def residency(num_blocks: int = 200, max_model_len: int = 2000, clock: Clock | None = None) -> Residency:
    return Residency(num_blocks, BLOCK, max_model_len, clock or Clock())


def statuses(admission: Admission) -> list[str]:
    return [report.status for report in admission.spans]


def checked(cache: Residency, prompt: SpanPrompt, **options: object) -> Admission:
    """Admit and finish one request, alone, with the invariants that hold for all."""
    admission = cache.admit_alone(request(prompt, **options), 1)
    cache.finish(admission)
    assert cache.problems() == []
    assert admission.cached + admission.computed == len(prompt)
    for report in admission.spans:
        assert report.moved + report.repaired + report.computed == report.end - report.start
    return admission


def test_without_spans_it_is_a_prefix_cache() -> None:
    cache = residency()
    prompt = SpanPrompt(ids(50, 1))
    first = checked(cache, prompt)
    assert (first.computed, first.cached, first.internal) == (50, 0, 0)
    again = checked(cache, prompt)
    assert (again.computed, again.cached) == (2, 48)
    longer = checked(cache, SpanPrompt(prompt.token_ids[:40] + ids(9, 2)))
    assert longer.cached == 32
    aligned = SpanPrompt(ids(48, 3))
    checked(cache, aligned)
    assert checked(cache, aligned).cached == 32  # one token must be computed, so the last block is


def test_a_cold_prompt_materialises_head_and_spans() -> None:
    cache = residency()
    first = checked(cache, prompt_of(document(1), document(2)))
    assert statuses(first) == ["new", "new"]
    # in context: two repaired ranges of 4 and the tail of 5; internal: the head, and each document behind its header
    assert (first.computed, first.internal) == (4 + 4 + 5, 3 + 43 + 43)


def test_a_new_order_hits_and_computes_only_what_is_in_context() -> None:
    cache = residency()
    checked(cache, prompt_of(document(1), document(2)))
    other = checked(cache, prompt_of(document(2), document(1), tail=(9, 9, 9)))
    assert statuses(other) == ["hit", "hit"]
    assert (other.computed, other.internal) == (4 + 4 + 3, 0)
    assert [(r.moved, r.repaired) for r in other.spans] == [(36, 4), (36, 4)]


def test_a_warm_assembly_is_found_up_to_a_block_boundary() -> None:
    cache = residency()
    prompt = prompt_of(document(1), document(2))
    checked(cache, prompt)
    again = checked(cache, prompt)
    # 88 tokens: 80 in full blocks behind which 3 of document 2 are moved again, and the tail
    assert (again.computed, again.internal) == (5, 0)
    longer = SpanPrompt(prompt.token_ids + ids(30, 5), prompt.spans)
    assert checked(cache, longer).computed == 5 + 30


def test_an_assembly_is_never_taken_for_full_attention_nor_for_another_assembly() -> None:
    cache = residency()
    prompt = prompt_of(document(1), document(2), head=ids(32, 7))
    checked(cache, prompt)
    exact = checked(cache, SpanPrompt(prompt.token_ids))
    assert exact.cached == 32
    other_rung = prompt_of(document(1), document(2), head=ids(32, 7), repair=8)
    admission = checked(cache, other_rung)
    assert statuses(admission) == ["hit", "hit"]
    assert admission.computed == 8 + 8 + 5


def test_what_fills_no_block_is_found_where_it_was_made_for_a_span() -> None:
    cache = residency()
    checked(cache, prompt_of(document(1, 7)))
    assert statuses(checked(cache, prompt_of(document(1, 7), head=(9, 9)))) == ["hit"]
    checked(cache, SpanPrompt((*HEADER.token_ids, *document(2, 7))))
    assert statuses(checked(cache, prompt_of(document(2, 7)))) == ["new"]


def test_one_span_twice_is_made_once() -> None:
    cache = residency()
    twice = checked(cache, prompt_of(document(1), document(1)))
    assert statuses(twice) == ["new", "new"]
    assert twice.internal == 3 + 43


def test_tenants_share_nothing() -> None:
    cache = residency()
    prompt = prompt_of(document(1))
    checked(cache, prompt)
    assert statuses(checked(cache, prompt, salt="a")) == ["new"]
    assert statuses(checked(cache, prompt, adapter="b")) == ["new"]
    assert statuses(checked(cache, prompt, salt="a")) == ["hit"]


def test_a_span_repaired_whole_needs_no_source() -> None:
    cache = residency()
    admission = checked(cache, prompt_of(document(1), repair=100))
    (report,) = admission.spans
    assert (report.status, report.repaired, report.moved) == ("computed", 40, 0)
    assert report.why == "nothing of it is moved: all 40 tokens are computed in context"
    assert (admission.computed, admission.internal) == (48, 0)


def test_sources_behind_one_long_anchor_share_its_blocks() -> None:
    cache = residency()
    head = ids(32, 7)
    admission = checked(cache, prompt_of(document(1, 16), document(2, 16), head=head, anchor=SpanPrompt(head)))
    assert admission.internal == 32 + 16 + 16  # the head, then only what stands behind it


def test_an_evicted_source_is_computed_again_and_reported() -> None:
    cache = residency(num_blocks=14)
    checked(cache, prompt_of(document(1)))
    for number in range(2, 6):
        checked(cache, prompt_of(document(number)))
    again = checked(cache, prompt_of(document(1)))
    assert statuses(again) == ["evicted"]
    assert again.internal == 43


def test_copies_go_before_sources() -> None:
    # pool: 6 sources of 3 blocks and the head's, and 8 for one assembled prompt of 2 documents
    cache = residency(num_blocks=6 * 3 + 1 + 8)
    for first in range(0, 6, 2):
        checked(cache, prompt_of(document(first), document(first + 1)))
    rng = random.Random(3)
    for _ in range(50):
        admission = checked(cache, prompt_of(*(document(n) for n in rng.sample(range(6), 2))))
        assert statuses(admission) == ["hit", "hit"]
        assert admission.internal == 0


def test_a_lease_keeps_the_partial_last_block_until_consumed() -> None:
    cache = residency()
    inner = request(SpanPrompt(ids(35, 1)), lease=Lease(consumers=2))
    answer = ids(20, 2)
    cache.finish(cache.admit(inner, 20), answer)
    assert cache.problems() == []
    span_ids = inner.prompt.token_ids[-3:] + answer
    outer = SpanPrompt((1, 2, 3, *span_ids, 4, 5), (Span(3, 26, SpanPrompt(inner.prompt.token_ids[:-3]), 0, 3),))
    first = checked(cache, outer)
    assert statuses(first) == ["hit"]
    assert (first.spans[0].moved, first.spans[0].computed) == (22, 1)
    assert (first.computed, first.internal) == (
        3 + 3,
        0,
    )  # the head, which alone is missing; the last sampled token and the tail
    assert len(cache.leases) == 1
    assert statuses(checked(cache, SpanPrompt((7, *outer.token_ids[1:]), outer.spans))) == ["hit"]
    assert len(cache.leases) == 0
    late = checked(cache, SpanPrompt((8, *outer.token_ids[1:]), outer.spans))
    assert statuses(late) == ["evicted"]
    assert late.internal == 3 + 6  # of the answer behind its prompt all but the last block is found as a prefix


def test_leases_end_by_time_release_and_reset() -> None:
    clock = Clock()
    cache = residency(clock=clock)
    for name, lease in (("a", Lease(seconds=5)), ("b", Lease(seconds=50)), ("c", Lease())):
        held = EngineRequest(name, SpanPrompt(ids(20, 1)), Sampling(max_tokens=3), lease=lease)
        cache.finish(cache.admit(held, 3), (1, 2, 3))
    clock.now = 10.0
    cache.leases.expire()
    assert len(cache.leases) == 2
    cache.leases.end("b")
    cache.leases.end("unknown")
    cache.reset()
    assert len(cache.leases) == 0
    assert cache.problems() == []
    assert cache.pool.num_free == 200


def test_pressure_ends_leases_and_says_evicted() -> None:
    cache = residency(num_blocks=12)
    inner = request(SpanPrompt(ids(60, 1)), lease=Lease())
    answer = ids(20, 2)
    cache.finish(cache.admit(inner, 20), answer)
    checked(cache, SpanPrompt(ids(180, 3)))
    assert len(cache.leases) == 0
    outer = SpanPrompt((1, 2, 3, *answer, 4, 5), (Span(3, 23, inner.prompt, 0, 0),))
    assert statuses(checked(cache, outer)) == ["evicted"]


def test_a_pool_too_small_for_span_and_prompt_computes_in_context() -> None:
    cache = residency(num_blocks=7, max_model_len=112)
    admission = checked(cache, prompt_of(document(1, 60), head=(9, 9, 9)))
    (report,) = admission.spans
    assert (report.status, report.computed, report.moved) == ("unsupported", 60, 0)
    assert "do not fit into the pool together" in report.why
    assert admission.computed == len(admission.prompt)


def test_a_source_over_the_window_has_its_prompt_run_exactly() -> None:
    cache = residency(max_model_len=100)
    admission = checked(cache, prompt_of(document(1, 20), document(2, 20), anchor=SpanPrompt(ids(79, 9)), repair=0))
    assert statuses(admission) == ["new", "new"]
    admission = checked(cache, prompt_of(document(1, 20), document(2, 19), anchor=SpanPrompt(ids(80, 9)), repair=0))
    assert statuses(admission) == ["unsupported", "unsupported"]
    assert admission.spans[1].why == "a span behind its anchor has 100 tokens, too many for the window of 100"


def test_a_full_pool_takes_nothing_and_remembers_what_it_made() -> None:
    cache = residency(num_blocks=16)
    blocker = cache.admit(request(SpanPrompt(ids(100, 1))), 1)
    free = cache.pool.num_free
    wanted = request(prompt_of(document(1), document(2)))
    with pytest.raises(PoolFull):
        cache.admit(wanted, 1)
    assert cache.pool.num_free == free
    assert cache.problems() == []
    cache.finish(blocker)
    admission = cache.admit(wanted, 1)
    assert statuses(admission) == ["new", "new"]
    assert admission.internal == 3 + 43 + 43
    cache.abandon(admission)
    assert cache.problems() == []


def test_an_assembled_anchor_is_made_by_assembling_it() -> None:
    cache = residency()
    inner = prompt_of(document(1), document(2))
    answer = ids(20, 2)
    outer = SpanPrompt((1, 2, 3, *answer, 4, 5), (Span(3, 23, inner, 0, 0),))
    first = checked(cache, outer)
    # the head (shared), the documents behind their header, ranges of 4 each, the tail of 5, and the answer's 19
    assert first.internal == 3 + 43 + 43 + (4 + 4 + 5 + 19)
    assert statuses(first) == ["new"]
    assert statuses(checked(cache, inner)) == ["hit", "hit"]
    other = SpanPrompt((9, 2, 3, *answer, 4, 5), outer.spans)
    assert statuses(checked(cache, other)) == ["hit"]


def test_a_copy_is_independent() -> None:
    cache = residency()
    checked(cache, prompt_of(document(1)))
    held = request(SpanPrompt(ids(20, 1)), lease=Lease())
    cache.finish(cache.admit(held, 3), (1, 2, 3))
    copy = cache.copy()
    copy.reset()
    assert copy.problems() == []
    assert len(cache.leases) == 1
    assert statuses(checked(cache, prompt_of(document(1), tail=(9,)))) == ["hit"]
    assert statuses(checked(copy, prompt_of(document(1), tail=(9,)))) == ["evicted"]


def hit_rates(num_documents: int, num_prompts: int, share: float, seed: int) -> list[float]:
    """The share of spans that hit, per hundred prompts of 4 documents in novel orders; the pool holds `share`."""
    rng = random.Random(seed)
    documents = [document(n, rng.randint(60, 140)) for n in range(num_documents)]
    source_blocks = sum(-(-(len(HEADER) + len(d)) // BLOCK) for d in documents)
    cache = residency(num_blocks=int(source_blocks * share))
    seen: set[tuple[int, ...]] = set()
    hits: list[int] = []
    while len(hits) < num_prompts:
        order = tuple(rng.sample(range(num_documents), 4))
        if order in seen:
            continue
        seen.add(order)
        admission = checked(cache, prompt_of(*(documents[n] for n in order), tail=ids(12, len(hits))))
        hits.append(statuses(admission).count("hit"))
    return [sum(hits[i : i + 100]) / 400 for i in range(0, num_prompts, 100)]


def test_a_thousand_novel_orders_do_not_wear_the_hit_rate_down() -> None:
    rates = hit_rates(40, 1000, 0.5, seed=7)
    assert abs(rates[-1] - rates[1]) < 0.05
    assert min(rates[1:]) > 0.2


def test_with_room_for_all_documents_everything_hits() -> None:
    assert hit_rates(12, 300, 2.0, seed=7)[1:] == [1.0, 1.0]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_books_stay_right_and_predictions_true(data: st.DataObject) -> None:
    cache = residency(num_blocks=data.draw(st.integers(24, 60)), max_model_len=300)
    running: list[Admission] = []
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["ask", "ask", "ask", "finish", "abandon", "release", "reset"]))
        if action == "ask":
            docs = data.draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
            lengths = [20, 45, 33, 16, 29, 60, 13, 40]
            prompt = prompt_of(*(document(n, lengths[n]) for n in docs), repair=data.draw(st.sampled_from([0, 4, 100])))
            asked = request(prompt, lease=data.draw(st.sampled_from([None, Lease()])))
            copy = cache.copy()
            try:
                admission = cache.admit(asked, 20)
            except PoolFull:
                with pytest.raises(PoolFull):
                    copy.admit(asked, 20)
                cache.withdraw(asked.request_id)
            else:
                told = copy.admit(asked, 20)
                assert (told.spans, told.internal, told.computed) == (
                    admission.spans, admission.internal, admission.computed,
                )  # fmt: skip
                running.append(admission)
        elif action == "release":
            cache.leases.end_oldest()
        elif action == "reset":
            cache.reset()
        elif running:
            ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
            if action == "finish":
                cache.finish(ended, ids(data.draw(st.integers(1, 20)), 5))
            else:
                cache.abandon(ended)
        assert cache.problems() == []
    for ended in running:
        cache.finish(ended)
    cache.reset()
    assert cache.pool.num_free == cache.pool.num_blocks
    assert cache.problems() == []


def test_the_audit_finds_what_is_wrong() -> None:
    pool = BlockPool(4)
    taken = pool.take(2)
    assert pool.problems([taken]) == []
    assert pool.problems([]) == ["block 0: 1 holders, 0 known", "block 1: 1 holders, 0 known"]
    pool.register(0, b"key", is_copy=False)
    pool._key[0] = b"other"
    pool._free[0].pop(3)
    assert pool.problems([taken])[0] == "the free blocks are not those without a holder"
    assert pool.problems([taken])[1] == "block 0 does not hold what it is found by"
    with pytest.raises(AssertionError, match="freed more often than held"):
        pool.free([0, 0])


def test_block_keys_cover_what_stands_before_and_the_spans() -> None:
    tokens = ids(64, 1)
    plain = block_keys(None, SpanPrompt(tokens), BLOCK)
    spanned = block_keys(None, SpanPrompt(tokens, (Span(20, 30, NO_ANCHOR, 0),)), BLOCK)
    assert len(plain) == 4
    assert plain[0] == spanned[0]
    assert set(plain[1:]).isdisjoint(spanned[1:])
    assert set(plain).isdisjoint(block_keys("salt", SpanPrompt(tokens), BLOCK))
    longer = SpanPrompt(tokens + (1,) * 15)
    assert block_keys(None, longer, BLOCK) == plain == block_keys(None, longer, BLOCK, tail=True)[:-1]
    assert block_keys(None, SpanPrompt(tokens), BLOCK, tail=True) == plain
