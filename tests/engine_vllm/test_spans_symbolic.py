"""Random arrivals, hits, pressure, aborts, preemptions and resets through the real scheduler and block pool."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from symbolic_prompts import conversation

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm

_SYSTEM = (1, 2, 3, 4, 5)
_HEADER = (7, 8, 9)
_CLOSING = 12
_ANSWER = (7, 11)
_DOCUMENTS = [
    tuple(range(100 + 60 * n, 100 + 60 * n + length)) for n, length in enumerate((1, 2, 9, 16, 17, 23, 32, 40))
]
_BLOCK = 16


def documents_prompt(chosen: list[int], repair: int, anchor: str, question: int, head: int = 5) -> SpanPrompt:
    """System text of `head` tokens, header, documents as spans, a question of some tokens, the end of its turn."""
    ids: list[int] = [*_SYSTEM, *range(700, 700 + head - len(_SYSTEM)), *_HEADER]
    behind = {"header": SpanPrompt(_HEADER), "none": NO_ANCHOR, "head": SpanPrompt(tuple(ids))}[anchor]
    spans = []
    for number in chosen:
        document = _DOCUMENTS[number]
        spans.append(Span(len(ids), len(ids) + len(document), behind, min(repair, len(document))))
        ids += document
    return SpanPrompt((*ids, *range(40, 40 + question), _CLOSING, *_ANSWER), tuple(spans))


def judge_prompt(
    inner: list[tuple[SpanPrompt, list[int]]], repair: int, question: int, is_adjacent: bool, continues: bool
) -> SpanPrompt:
    """A prompt that takes the outputs of inner prompts over, each with the header of its turn. It begins with a system
    text, or continues the first one.

    `is_adjacent`: with what stands before it too, from the span before on; in the inner prompt it stands there as well.
    """
    ids: list[int] = [2, *_SYSTEM]
    spans: list[Span] = []
    if continues:
        ids, spans = [*inner[0][0].token_ids[: -len(_ANSWER)]], [*inner[0][0].spans]
    for prompt, tokens in inner:
        start = spans[-1].end if is_adjacent and spans else len(ids)
        ids += _ANSWER
        width = len(ids) - start
        ids += tokens
        anchor = SpanPrompt(prompt.token_ids[:-width], prompt.spans)
        spans.append(Span(start, len(ids), anchor, min(repair, len(ids) - start), width))
        ids.append(_CLOSING)
    return SpanPrompt((*ids, *range(60, 60 + question), _CLOSING, *_ANSWER), tuple(spans))


class Traffic(RuleBasedStateMachine):
    """Requests of all kinds, in any order, on a pool that is too small for them."""

    model: Path

    @initialize(
        num_blocks=st.sampled_from([14, 20, 40, 120]),
        lag=st.sampled_from([0, 1]),
        budget=st.sampled_from([16, 40, 256]),
        seats=st.sampled_from([2, 16]),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 7]),
    )
    def start(self, num_blocks: int, lag: int, budget: int, seats: int, policy: str, threshold: int) -> None:
        from symbolic_engine import SymbolicEngine

        self.policy = policy
        self.inner: list[str] = []
        self.engine: Any = SymbolicEngine(
            self.model,
            num_blocks,
            _BLOCK,
            lag=lag,
            headers=[_HEADER],
            max_model_len=min(256, (num_blocks - 1) * _BLOCK),
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            scheduling_policy=policy,
            long_prefill_token_threshold=threshold,
        )

    def send(self, prompt: SpanPrompt, max_tokens: int, priority: int, lease: bool, **options: Any) -> None:
        """Queue a request, if the window is wide enough for it."""
        if len(prompt) + max_tokens > self.engine.scheduler.max_model_len:
            return
        options["priority"] = priority if self.policy == "priority" else 0
        name = self.engine.send(prompt, max_tokens, lease=Lease() if lease else None, **options)
        if lease:
            self.inner.append(name)

    @rule(
        chosen=st.lists(st.integers(0, len(_DOCUMENTS) - 1), min_size=1, max_size=5),
        repair=st.sampled_from([0, 0, 3, 20]),
        anchor=st.sampled_from(["header", "none", "head"]),
        head=st.sampled_from([5, 40, 61]),
        question=st.integers(0, 20),
        max_tokens=st.sampled_from([1, 2, 30]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 2),
        leased=st.booleans(),
    )
    def ask_documents(
        self,
        chosen: list[int],
        repair: int,
        anchor: str,
        head: int,
        question: int,
        max_tokens: int,
        salt: str | None,
        priority: int,
        leased: bool,
    ) -> None:
        prompt = documents_prompt(chosen, repair, anchor, question, head)
        self.send(prompt, max_tokens, priority, leased, salt=salt)

    @rule(
        groups=st.integers(1, 3),
        documents=st.integers(1, 2),
        length=st.sampled_from([2, 9, 20]),
        question=st.integers(1, 12),
        max_tokens=st.sampled_from([1, 2, 30]),
        priority=st.integers(0, 2),
        leased=st.booleans(),
    )
    def converse(
        self, groups: int, documents: int, length: int, question: int, max_tokens: int, priority: int, leased: bool
    ) -> None:
        self.send(conversation(groups, documents, length, question), max_tokens, priority, leased)

    @rule(
        number=st.integers(0, len(_DOCUMENTS) - 1),
        behind=st.sampled_from([(), _HEADER, _HEADER]),
        max_tokens=st.sampled_from([1, 1, 30]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 2),
    )
    def prefetch(self, number: int, behind: tuple[int, ...], max_tokens: int, salt: str | None, priority: int) -> None:
        prompt = SpanPrompt((*behind, *_DOCUMENTS[number]))
        self.send(prompt, max_tokens, priority, False, salt=salt, keep=True)

    @rule(question=st.integers(0, 60), max_tokens=st.sampled_from([1, 5, 40]), leased=st.booleans())
    def ask_plain(self, question: int, max_tokens: int, leased: bool) -> None:
        prompt = SpanPrompt((*_SYSTEM, *_HEADER, *range(300, 300 + question), _CLOSING, *_ANSWER))
        self.send(prompt, max_tokens, 1, leased)

    @precondition(lambda self: self.inner)
    @rule(
        data=st.data(),
        repair=st.sampled_from([0, 3]),
        question=st.integers(0, 9),
        is_adjacent=st.booleans(),
        continues=st.booleans(),
        leased=st.booleans(),
    )
    def judge(
        self, data: st.DataObject, repair: int, question: int, is_adjacent: bool, continues: bool, leased: bool
    ) -> None:
        sent = self.engine.sent
        done = [name for name in self.inner if name in sent and sent[name].finished and sent[name].salt is None]
        if not done:
            return
        chosen = data.draw(st.lists(st.sampled_from(done), min_size=1, max_size=4))
        inner = [(sent[name].prompt, sent[name].tokens) for name in chosen]
        is_adjacent &= all(one.token_ids[-3] == _CLOSING for one, _ in inner)
        prompt = judge_prompt(inner, repair, question, is_adjacent, continues)
        self.send(prompt, 3, 1, leased)

    @rule(steps=st.integers(1, 6))
    def run_some(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        under_way = [name for name, sent in self.engine.sent.items() if not sent.finished]
        if under_way:
            self.engine.abort(data.draw(st.sampled_from(under_way)))

    @rule(count=st.integers(1, 3))
    def preempt(self, count: int) -> None:
        self.engine.preempt(count)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.engine.reset(running)

    @invariant()
    def all_is_right(self) -> None:
        self.engine.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.finish()
            self.engine.check()
            counts = self.engine.scheduler.audit()
            assert not any(counts[name] for name in ("requests", "internal", "held", "families", "pins")), counts


def test_any_traffic(model_dir: Path) -> None:
    """Every answer is that of its definition, no step leaves a wrong count, and nothing hangs."""
    machine = type("Traffic", (Traffic,), {"model": model_dir})
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=40))


def start(model_dir: Path, num_blocks: int, **options: Any) -> Any:
    from symbolic_engine import SymbolicEngine

    return SymbolicEngine(model_dir, num_blocks, _BLOCK, headers=[_HEADER], **options)


def one(engine: Any, prompt: SpanPrompt) -> list[str]:
    """Ask alone, check the answer; what became of each span."""
    name = engine.send(prompt)
    engine.finish()
    engine.check()
    statuses: list[str] = engine.statuses(name)
    return statuses


def corpus_prompt(documents: list[tuple[int, ...]], repair: int = 3, head: int = 5) -> SpanPrompt:
    ids: list[int] = [*range(700, 700 + head), *_HEADER]
    spans = []
    for document in documents:
        spans.append(Span(len(ids), len(ids) + len(document), SpanPrompt(_HEADER), repair))
        ids += document
    return SpanPrompt((*ids, *range(40, 50), *_ANSWER), tuple(spans))


def test_sources_outlive_copies(model_dir: Path) -> None:
    """Prompts of four documents flow through a pool that holds the corpus and two prompts: no document is lost."""
    documents = [tuple(range(100 + 60 * n, 129 + 60 * n)) for n in range(12)]
    engine = start(model_dir, 1 + 2 * 12 + 2 * 10)
    order = random.Random(3)
    for at in range(0, 12, 4):
        assert one(engine, corpus_prompt(documents[at : at + 4])) == ["new"] * 4
    for _ in range(60):
        assert one(engine, corpus_prompt(order.sample(documents, 4))) == ["hit"] * 4


def test_a_follow_up_turn_finds_the_assembled_prompt(model_dir: Path) -> None:
    """Copies go first when memory is short, and not before: what was assembled is hit, not moved again."""
    engine = start(model_dir, 60)
    first = corpus_prompt([tuple(range(100, 150)), tuple(range(200, 240))])
    one(engine, first)
    moved = engine.scheduler.spans.counters["moved_tokens"]
    one(engine, SpanPrompt((*first.token_ids, *range(30)), first.spans))
    # Only what fills no block is moved again.
    assert engine.scheduler.spans.counters["moved_tokens"] - moved < _BLOCK


def test_the_hit_rate_does_not_decay(model_dir: Path) -> None:
    """1,000 prompts of 4 out of 40 documents in novel orders; the pool holds half of the documents."""
    documents = [tuple(range(100 + 60 * n, 129 + 60 * n)) for n in range(40)]
    engine = start(model_dir, 1 + 2 * 20 + 10, audit_steps=False)
    order = random.Random(11)
    hits = [one(engine, corpus_prompt(order.sample(documents, 4))).count("hit") for _ in range(1000)]
    assert sum(hits[-100:]) > 0.8 * sum(hits[100:200]) > 40


def test_what_fits_once_is_moved_in_place(model_dir: Path) -> None:
    """A prompt and its sources do not fit together: the sources' blocks become the prompt's."""
    engine = start(model_dir, 14, max_model_len=208)
    documents = [tuple(range(100 + 60 * n, 140 + 60 * n)) for n in range(3)]
    prompt = corpus_prompt(documents)
    assert 2 * (len(prompt) // _BLOCK) > 13
    name = engine.send(prompt)
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"] * 3
    assert any("in place" in why for why in engine.whys(name))
    assert engine.scheduler.spans.counters["taken_over"] > 0


@pytest.mark.parametrize("head", [5, 40, 61, 90])
@pytest.mark.parametrize("num_blocks", [14, 15, 18, 20, 22, 25])
def test_pools_of_any_size_serve_heads_of_any_length(model_dir: Path, num_blocks: int, head: int) -> None:
    """Blocks of a head that are adopted are in the free queue until then: they count among those that are wanted."""
    engine = start(model_dir, num_blocks, max_model_len=min(256, (num_blocks - 1) * _BLOCK))
    documents = [tuple(range(100 + 60 * n, 140 + 60 * n)) for n in range(3)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        prompt = corpus_prompt([documents[n] for n in order], head=head)
        if len(prompt) < engine.scheduler.max_model_len:
            one(engine, prompt)


def test_a_source_under_way_is_new_for_everybody(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    documents = [tuple(range(100, 140)), tuple(range(200, 240))]
    names = [engine.send(corpus_prompt(documents[::step])) for step in (1, -1)]
    engine.finish()
    engine.check()
    assert [engine.statuses(name) for name in names] == [["new"] * 2] * 2
    assert engine.scheduler.spans.counters["sources"] == 3


def test_what_was_taken_over_is_found_where_it_is_now(model_dir: Path) -> None:
    """The source is gone, its copy in the prompt is not; after so many rotations it is computed anew."""
    engine = start(model_dir, 14, max_model_len=208)
    documents = [tuple(range(100 + 60 * n, 140 + 60 * n)) for n in range(3)]
    one(engine, corpus_prompt(documents))
    taken = engine.scheduler.spans.counters["taken_over"]
    assert taken > 0
    assert one(engine, corpus_prompt(documents[::-1])) == ["hit"] * 3
    engine.scheduler.spans.assembler.max_rotations = 0
    assert "evicted" in one(engine, corpus_prompt([documents[1], documents[0], documents[2]]))


def test_a_failed_comparison_at_start_up_reaches_the_client(model_dir: Path) -> None:
    """Keys that come out wrong turn spans off, and the probe's own answer says so."""
    engine = start(model_dir, 60)
    name = engine.send(SpanPrompt((*range(24), *range(24))), 4, probe=True)
    engine.step()
    engine.step()
    assert engine.scheduler.spans.probe.sent == {name}
    engine.scheduler.connector.unsupported = "a key differs by 5.0e-01"  # what the worker's word is taken for
    engine.finish()
    assert engine.answers(name)["unsupported"] == "a key differs by 5.0e-01"
    assert one(engine, corpus_prompt([tuple(range(100, 140))])) == ["unsupported"]


def test_what_was_taken_over_is_not_read_from_blocks_that_were_reused() -> None:
    from spanflow.engine.vllm.copies import Found, Relocated

    block = SimpleNamespace(block_hash="a")
    where = Relocated(10, 40, (block, block), ("a", "a"), 3, 100, 1)
    assert where.find(12, 20, 16) == Found((block,), 5, 112, 1)
    assert where.find(9, 20, 16) is None
    assert where.find(12, 41, 16) is None
    block.block_hash = "b"
    assert where.find(12, 20, 16) is None
