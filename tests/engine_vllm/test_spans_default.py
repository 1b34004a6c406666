"""Spans on the default configuration, the engine in a process of its own, against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
from vllm_rig import TEXTS, TOLERANCE, Answer, Judge, Rig, difference, generate_candidates, probability_difference

from spanflow.engine.protocol import Lease, Usage
from spanflow.errors import PromptTooLong, QueryError
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def rig(start_rig: Any) -> Rig:
    return start_rig()


@pytest.mark.parametrize("position", [1, 31, 32, 33, 500, 4000])
def test_a_span_prepared_at_0_is_used_anywhere(rig: Rig, judge: Judge, position: int) -> None:
    rig.reset()
    document = rig.document(0)
    rig.prefetch(SpanPrompt(document))
    filler = (rig.encode("\n") + rig.encode(TEXTS[1]) * (position // 20 + 1))[:position]
    ids = (*filler, *document, *rig.encode("\nSo?"), *rig.answer_header)
    answer = rig.one(SpanPrompt(ids, (Span(position, position + len(document), NO_ANCHOR),)))
    assert answer.statuses == ["hit"]
    judge.check(answer)


def test_cold_equals_prepared_equals_repeated(rig: Rig, judge: Judge) -> None:
    rig.reset()
    documents = [rig.document(n) for n in range(3)]
    prompt = rig.prompt(documents, repair=8)
    cold, warm, again = rig.one(prompt), rig.one(prompt), rig.one(prompt)
    assert cold.statuses == ["new"] * 3
    assert warm.statuses == ["hit"] * 3
    assert difference(cold, warm) < 1e-5
    assert difference(cold, again) < 1e-5
    rig.reset()
    evicted = rig.one(prompt)
    assert evicted.statuses == ["evicted"] * 3
    assert difference(cold, evicted) < 1e-5
    rig.reset()
    rig.prefetch(*[SpanPrompt(rig.header + document) for document in documents])
    prepared = rig.one(prompt)
    assert prepared.statuses == ["hit"] * 3
    assert difference(cold, prepared) < 1e-5
    judge.check(cold, prepared)


def test_what_stood_before_leaves_no_trace(rig: Rig, judge: Judge) -> None:
    rig.reset()
    one, two, three = (rig.document(n) for n in range(3))
    prompts = [rig.prompt([one, two]), rig.prompt([three, two], repair=4), rig.prompt([two, one], "Where?")]
    answers = [rig.one(prompt) for prompt in prompts]
    found = [[status == "hit" for status in answer.statuses] for answer in answers]
    assert found == [[False, False], [False, True], [True, True]]
    judge.check(*answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        rig.reset()
        afresh = rig.one(prompt)
        assert afresh.statuses == ["evicted"] * 2
        assert difference(answer, afresh) < 1e-5


def test_one_span_twice_and_one_span_at_two_offsets_at_once(rig: Rig, judge: Judge) -> None:
    rig.reset()
    one, two = rig.document(3), rig.document(4)
    prompts = [rig.prompt([one, one]), rig.prompt([two, one]), rig.prompt([one, two], repair=5)]
    judge.check(*rig.ask(*prompts))


@pytest.mark.parametrize("repair", [0, 1, 16, 10_000])
@pytest.mark.parametrize("anchor", ["header", "head", "none"])
def test_rungs_and_anchors(rig: Rig, judge: Judge, anchor: str, repair: int) -> None:
    documents = [rig.document(n, 2) for n in (5, 6, 7)]
    head = rig.prompt([]).token_ids
    start = rig.prompt(documents).spans[0].start
    behind = {"header": None, "head": SpanPrompt(head[:start]), "none": NO_ANCHOR}[anchor]
    answer = rig.one(rig.prompt(documents, repair=repair, anchor=behind))
    judge.check(answer)
    if repair == 10_000:
        full = check_stock(rig, judge, answer)
        # What is not repaired is another answer, and all but one token of each span repaired is close to none.
        moved = rig.one(rig.prompt(documents, anchor=behind))
        nearly = rig.one(rig.prompt(documents, repair=min(map(len, documents)) - 1, anchor=behind))
        assert judge.distance(moved, full) > 10 * 1e-4
        assert judge.distance(nearly, full) < judge.distance(moved, full)
        judge.check(nearly)


def check_stock(rig: Rig, judge: Judge, answer: Answer) -> SpanPrompt:
    """An answer is that of full attention, by this engine without spans (which says what stock vLLM does, as is tested
    elsewhere) and by the oracle, with the same ten best tokens."""
    full = SpanPrompt(answer.prompt.token_ids)
    stock = rig.one(full, salt="stock")
    best = judge.oracle.prompt_logits(full)[-1].topk(10).indices
    assert answer.logprobs[0].keys() == stock.logprobs[0].keys() == set(best.tolist())
    assert difference(answer, stock) < 1e-4
    assert judge.distance(answer, full) < 1e-4
    return full


def test_each_token_of_an_answer(rig: Rig, judge: Judge) -> None:
    """Behind documents that are moved, and in part computed anew."""
    prompt = rig.prompt([rig.document(n) for n in (1, 2)], repair=8)
    # It has enough to say.
    answer = rig.one(SpanPrompt(prompt.token_ids + rig.endless(5).token_ids, prompt.spans), max_tokens=12)
    assert len(answer.token_ids) == 12
    judge.check(answer)


def test_short_spans_share_a_block(rig: Rig, judge: Judge) -> None:
    words = [tuple(rig.encode(word)) for word in (" red", " green apple", " blue", " a long grey road")]
    judge.check(*rig.ask(rig.prompt(words), rig.prompt(words[::-1], repair=1)))


def test_the_question_before_the_documents(rig: Rig, judge: Judge) -> None:
    lead = rig.encode("<|im_start|>user\nWhere does the ferry go?<|im_end|>\n")
    judge.check(rig.one(rig.prompt([rig.document(8), rig.document(2)], lead=lead, repair=3)))


def test_a_conversation_with_a_retrieval_in_each_turn(rig: Rig, judge: Judge) -> None:
    """Groups of spans with turns between them; each turn goes on where the last one ended."""
    rig.reset()
    ids = rig.encode("<|im_start|>system\nAnswer from the documents.<|im_end|>\n")
    spans: list[Span] = []
    for turn in range(3):
        ids += rig.header
        for number in (turn, turn + 1):
            document = rig.document(number, 2)
            spans.append(Span(len(ids), len(ids) + len(document), SpanPrompt(rig.header), 4))
            ids += document
        ids += rig.encode(f"\nQuestion {turn}?<|im_end|>\n") + list(rig.answer_header)
        answer = rig.one(SpanPrompt(tuple(ids), tuple(spans)), max_tokens=6)
        judge.check(answer)
        ids += [*answer.token_ids, *rig.encode("<|im_end|>\n")]
    assert answer.last.usage is not None
    assert answer.last.usage.cached > len(ids) // 2


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("repair", [0, 6])
def test_a_judge_takes_candidates_over(rig: Rig, judge: Judge, count: int, repair: int) -> None:
    inner = generate_candidates(rig, count, lease=Lease(consumers=2))
    outer = rig.judge(inner, repair=repair)
    answer, again = rig.one(outer), rig.one(outer)
    judge.check(answer, again)
    assert answer.statuses == again.statuses == ["hit"] * count
    assert difference(answer, again) < 1e-5
    cold = computed_anew(rig, judge, outer)
    assert probability_difference(answer, cold) < 1e-5
    assert difference(answer, cold) < TOLERANCE


def computed_anew(rig: Rig, judge: Judge, outer: SpanPrompt) -> Answer:
    """What was decoded is lost and prefilled: cold, repeated, cold again and prepared are the same to 1e-5.

    Decoded and prefilled KV come from other kernels, in stock vLLM too; both are held to the oracle.
    """
    rig.reset()
    cold, repeated = rig.one(outer), rig.one(outer)
    rig.reset()
    evicted = rig.one(outer)
    rig.reset()
    sources = [(span.anchor, outer.token_ids[span.start : span.end]) for span in outer.spans]
    rig.prefetch(*[SpanPrompt(anchor.token_ids + tokens, anchor.spans) for anchor, tokens in sources])
    prepared = rig.one(outer)
    assert cold.statuses == evicted.statuses == ["evicted"] * len(outer.spans)
    assert prepared.statuses == ["hit"] * len(outer.spans)
    judge.check(cold, repeated, evicted, prepared)
    assert max(difference(cold, other) for other in (repeated, evicted, prepared)) < 1e-5
    return cold


def test_candidates_whose_prompt_was_assembled_two_levels_deep(rig: Rig, judge: Judge) -> None:
    rig.reset()
    drafts = generate_candidates(rig, 2, prompt=rig.prompt([rig.document(1), rig.document(2)], repair=4))
    middle = generate_candidates(rig, 2, prompt=rig.judge(drafts, "Write a better one."), lease=Lease(consumers=2))
    outer = rig.judge(middle)
    warm, again = rig.one(outer), rig.one(outer)
    assert warm.statuses == again.statuses == ["hit", "hit"]
    judge.check(warm, again)
    assert difference(warm, again) < 1e-5
    cold = computed_anew(rig, judge, outer)
    assert probability_difference(warm, cold) < 1e-5
    assert difference(warm, cold) < TOLERANCE


def test_a_workflow_two_levels_deep_is_the_same_cold_prepared_and_repeated(rig: Rig, judge: Judge) -> None:
    """Each run generates its own drafts, and better ones: alone, since in other batches vLLM sums in another order."""
    documents = [rig.document(3), rig.document(9)]

    def candidates(prompt: SpanPrompt) -> list[Answer]:
        return [rig.one(prompt, 24, temperature=0.9, seed=seed, lease=Lease(consumers=2)) for seed in (1, 2)]

    def run() -> list[Answer]:
        drafts = candidates(rig.prompt(documents, repair=4))
        middle = candidates(rig.judge(drafts, "Write a better one."))
        return [*drafts, *middle, rig.one(rig.judge(middle, repair=4))]

    rig.reset()
    cold, repeated = run(), run()
    rig.reset()
    rig.prefetch(*[SpanPrompt(rig.header + document) for document in documents])
    prepared = run()
    judge.check(*cold, *repeated, *prepared)
    assert all(answer.statuses == ["hit", "hit"] for answer in [*cold[2:], *repeated, *prepared])
    assert max(map(difference, cold * 2, repeated + prepared)) < 1e-5


def test_a_candidate_that_is_repaired_whole(rig: Rig, judge: Judge) -> None:
    inner = generate_candidates(rig, 2)
    answer = rig.one(rig.judge(inner, repair=10_000))
    assert answer.statuses == ["computed"] * 2
    check_stock(rig, judge, answer)


@pytest.mark.parametrize("count", [4, 24])
def test_all_of_a_candidate_but_its_last_token_comes_from_cache(rig: Rig, judge: Judge, count: int) -> None:
    """Four of 80 words, and two dozen. Tokens are counted where they are computed: reports go by the prompt's shape."""
    if count == 4:
        inner = rig.ask(*[rig.endless(number) for number in range(count)], max_tokens=120, lease=Lease())
        assert all(len(answer.text.split()) >= 80 for answer in inner)
    else:
        inner = generate_candidates(rig, count, max_tokens=40)
    outer = rig.judge(inner, system=f"You are the judge of a contest of {count}.")
    head = SpanPrompt(outer.token_ids[: outer.spans[0].start])
    rig.prefetch(head)
    before = rig.computed()
    answer = rig.one(outer)
    computed = rig.computed() - before
    assert answer.statuses == ["hit"] * count
    assert computed == len(outer) - len(head) - sum(len(span) - 1 for span in outer.spans)
    assert answer.last.usage == Usage(len(outer), 1, len(outer) - computed, 0)
    judge.check(answer)


def test_new_span_in_several_requests_at_once_is_computed_once(rig: Rig, judge: Judge) -> None:
    rig.reset()
    one, two = rig.document(9), rig.document(10)
    before, num_sources = rig.computed(), rig.audit().get("sources", 0)
    prompts = [rig.prompt([one], "A?"), rig.prompt([one, two], "B?"), rig.prompt([two, one])]
    answers = rig.ask(*prompts, *prompts[2:] * 7)
    judge.check(*answers)
    # Two documents and one head.
    assert rig.audit()["sources"] - num_sources == 3
    sources = prompts[0].spans[0].start + sum(len(rig.header) + len(document) for document in (one, two))
    questions = [len(prompt) - prompt.spans[-1].end for prompt in prompts]
    again = min(questions[2], _behind_full_blocks(prompts[2]))
    assert rig.computed() - before == sources + sum(questions) + 7 * again


def _behind_full_blocks(prompt: SpanPrompt) -> int:
    """How many tokens of a prompt are computed where all its full blocks are found; one at least, by vLLM's rule."""
    return (len(prompt) - 1) % 32 + 1


@pytest.mark.parametrize("numbers", [(), (13, 14)])
def test_samples_share_one_prefill_and_stay_independent(rig: Rig, judge: Judge, numbers: tuple[int, ...]) -> None:
    """Without documents and over two; each sample is what its seed gives alone."""
    rig.reset()
    documents = [rig.document(number) for number in numbers]
    prompt = rig.prompt(documents)
    before = rig.computed()
    answers = generate_candidates(rig, 6, max_tokens=12, prompt=prompt, lease=None)
    sources = sum(len(rig.header) + len(document) for document in documents)
    prefill = sources + len(prompt) - sum(map(len, documents))
    question = len(prompt) - (prompt.spans[-1].end if prompt.spans else 0)
    sampled = sum(len(answer.token_ids) - 1 for answer in answers)
    again = min(question, _behind_full_blocks(prompt))
    assert rig.computed() - before == prefill + 5 * again + sampled
    assert len({answer.token_ids for answer in answers}) == 6
    judge.check(*answers)
    for number, answer in enumerate(answers):
        alone = rig.one(prompt, 12, temperature=0.9, seed=100 + number)
        assert alone.token_ids == answer.token_ids


def test_text_behind_spans_is_not_reused_behind_others(rig: Rig, judge: Judge) -> None:
    """The same tokens behind other spans, and as an ordinary request, give other KV and share none of it."""
    rig.reset()
    documents = [rig.document(11), rig.document(12)]
    moved = rig.prompt(documents)
    judge.check(rig.one(moved))
    plain = rig.one(SpanPrompt(moved.token_ids))
    judge.check(plain)
    judge.check(rig.one(rig.prompt(documents, repair=7)), rig.one(moved))
    assert plain.last.usage is not None
    assert plain.last.usage.cached <= moved.spans[0].start


def test_a_foreign_salt_shares_nothing(rig: Rig, judge: Judge) -> None:
    rig.reset()
    prompt = rig.prompt([rig.document(1), rig.document(5)])
    assert "hit" not in rig.one(prompt, salt="a").statuses
    assert rig.one(prompt, salt="a").statuses == ["hit", "hit"]
    other = rig.one(prompt, salt="b")
    assert "hit" not in other.statuses
    assert "hit" not in rig.one(prompt).statuses
    judge.check(other)


def test_no_spans_is_stock(rig: Rig, judge: Judge) -> None:
    before = rig.audit()
    answer = rig.one(rig.chat("Name a colour."), max_tokens=8)
    judge.check(answer)
    after = rig.audit()
    assert answer.spans == ()
    for name in ("sources", "moved_tokens", "ranges"):
        assert after.get(name, 0) == before.get(name, 0)


def test_stop_string_keeps_report_and_lease(rig: Rig, judge: Judge) -> None:
    inner = rig.chat("Count: one, two, three, four, five, six.")
    first = rig.one(inner, max_tokens=12)
    word = first.text.split()[2]
    stopped = rig.one(inner, max_tokens=12, stop=(word,), lease=Lease())
    assert stopped.last.finish_reason == "stop"
    documents = rig.one(rig.prompt([rig.document(0)]), max_tokens=12, stop=("e", "a", "o"))
    assert len(documents.spans) == 1
    answer = rig.one(rig.judge([stopped]))
    assert answer.statuses == ["hit"]
    judge.check(answer)


def test_bad_input_fails_alone(rig: Rig, judge: Judge) -> None:
    fine = rig.prompt([rig.document(0)])
    ids = fine.token_ids
    with pytest.raises(PromptTooLong, match=r"4608.*Shorten"):
        rig.one(SpanPrompt(ids * 60))
    with pytest.raises(QueryError, match="empty"):
        rig.one(SpanPrompt(()))
    with pytest.raises(QueryError, match="foreign anchor of 3 tokens"):
        rig.one(SpanPrompt(ids, (Span(20, 40, SpanPrompt((11, 12, 13))),)))
    with pytest.raises(QueryError, match="never ran under a lease"):
        rig.one(SpanPrompt(ids, (Span(20, 40, SpanPrompt(ids[:10]), 0, 3),)))
    with pytest.raises(QueryError, match="unknown adapter 'nobody'"):
        rig.one(fine, adapter="nobody")
    judge.check(rig.one(fine))


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("text", "flat list of ints is wanted"),
        ([99, 0, 0, 0, 0, 0, 0], "version 99"),
        ([1, 0, 0, 0, 0, 0, 1, 5, 5000, 0, -1, -1], "covers tokens"),
        ([1, 0, 0, 0, 0, 0, 2, 5, 9, 0, -1, -1, 8, 12, 0, -1, -1], "covers tokens"),
        ([1, 0, 0, 0, 0, 0, 1, 0, 9, 0, -1, -1], "starts at token 0"),
        ([1, 0, 0, 0, 0, 0, 1, 5, 9, 0, -1, 7], "anchor 7"),
        ([1, 0, 0, 0, 0, 0, 1, 5], "ends at int 8"),
        ([1, 0, 0, 0, 0, 0, 0, 3], "left over"),
    ],
)
def test_a_payload_from_outside_that_does_not_fit(rig: Rig, payload: Any, message: str) -> None:
    """What a client could send past our own checks: the request fails with a reason, the engine serves on."""
    from spanflow.engine.payload import unpack
    from spanflow.engine.protocol import EngineRequest
    from spanflow.ir.nodes import Sampling

    async def send() -> list[Any]:
        request = EngineRequest("outside", rig.prompt([rig.document(0)]), Sampling(4))
        return [piece async for piece in rig.engine._backend.generate(request, {"spanflow": payload}, None)]

    last = rig.wait(send())[-1]
    report = unpack(last.kv_transfer_params)
    assert last.outputs[0].finish_reason == "error"
    assert report is not None
    assert message in report[2]["error"]
    assert rig.one(rig.prompt([rig.document(0)])).last.finish_reason == "length"


@pytest.mark.parametrize("shape", ["other prompts", "one prompt", "continued"])
@pytest.mark.parametrize("count", [1, 2, 6, 24])
def test_temperature_0_never_computes_more_than_stock(rig: Rig, judge: Judge, count: int, shape: str) -> None:
    """All of it is counted, the inner generations too. Of one prompt that is asked many times stock vLLM computes no
    more than one, and a last block; where the outer prompt continues an inner one, it finds full blocks of that, and of
    its answer."""
    numbers = [0] * count if shape == "one prompt" else range(count)
    questions = [rig.chat(f"{TEXTS[number % len(TEXTS)]}Name {number + 2} rivers.") for number in numbers]
    counts = []
    for has_spans in (True, False):
        rig.reset()
        before = rig.computed()
        inner = rig.ask(*questions, max_tokens=16, lease=Lease() if has_spans else None)
        head = questions[0].token_ids[: -len(rig.answer_header)] if shape == "continued" else None
        outer = rig.judge(inner, system=f"You judge {count} answers.", head=head)
        answer = rig.one(outer if has_spans else SpanPrompt(outer.token_ids))
        counts.append(rig.computed() - before)
        assert answer.statuses == ["hit"] * count * has_spans
        judge.check(answer)
    ours, stock = counts
    assert ours <= stock
