"""Random arrivals, hits, pressure, aborts, preemptions and resets through the real scheduler and block pool."""

from __future__ import annotations

from pathlib import Path
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
from symbolic_prompts import ANSWER, BLOCK, CLOSING, HEADER, conversation, start

from spanflow.engine.protocol import Lease
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm

_SYSTEM = (1, 2, 3, 4, 5)
_DOCUMENTS = [
    tuple(range(100 + 60 * n, 100 + 60 * n + length)) for n, length in enumerate((1, 2, 9, 16, 17, 20, 23, 32, 40))
]
#: The clock counts steps.
_LEASES = st.sampled_from([None, Lease(), Lease(consumers=2), Lease(consumers=9), Lease(9, seconds=30)])
_CHOSEN_DOCUMENTS = st.integers(0, len(_DOCUMENTS) - 1)
#: From the last one on.
_CHOSEN = st.integers(0, 7)
_MOST_UNDER_WAY = 10


def documents_prompt(chosen: list[int], repair: int, anchor: str, question: int, head: int = 5) -> SpanPrompt:
    """System text of `head` tokens, header, documents as spans, a question of some tokens, the end of its turn."""
    ids: list[int] = [*_SYSTEM, *range(700, 700 + head - len(_SYSTEM)), *HEADER]
    behind = {"header": SpanPrompt(HEADER), "none": NO_ANCHOR, "head": SpanPrompt(tuple(ids))}[anchor]
    spans: list[Span] = []
    add_documents(ids, spans, chosen, behind, repair)
    return SpanPrompt((*ids, *range(40, 40 + question), CLOSING, *ANSWER), tuple(spans))


def add_documents(ids: list[int], spans: list[Span], chosen: list[int], behind: SpanPrompt, repair: int) -> None:
    for number in chosen:
        document = _DOCUMENTS[number]
        spans.append(Span(len(ids), len(ids) + len(document), behind, min(repair, len(document))))
        ids += document


def judge_prompt(
    inner: list[tuple[SpanPrompt, list[int]]],
    chosen: list[int],
    gap: int,
    repair: int,
    question: int,
    is_adjacent: bool,
    continues: bool,
) -> SpanPrompt:
    """A prompt that takes the outputs of inner prompts over, each with the header of its turn, and documents behind a
    further header. It begins with a system text, or continues the first one.

    `is_adjacent`: with what stands before it too, from the span before on; in the inner prompt it stands there as well.
    """
    ids: list[int] = [2, *_SYSTEM]
    spans: list[Span] = []
    if continues:
        ids, spans = [*inner[0][0].token_ids[: -len(ANSWER)]], [*inner[0][0].spans]
    for prompt, tokens in inner:
        start = spans[-1].end if is_adjacent and spans else len(ids)
        ids += ANSWER
        width = len(ids) - start
        ids += tokens
        anchor = SpanPrompt(prompt.token_ids[:-width], prompt.spans)
        spans.append(Span(start, len(ids), anchor, min(repair, len(ids) - start), width))
        ids.append(CLOSING)
    if chosen:
        ids += (*range(800, 800 + gap), *HEADER)
        add_documents(ids, spans, chosen, SpanPrompt(HEADER), repair)
    return SpanPrompt((*ids, *range(60, 60 + question), CLOSING, *ANSWER), tuple(spans))


_DOCUMENTS_PROMPTS = st.builds(
    documents_prompt,
    chosen=st.lists(_CHOSEN_DOCUMENTS, min_size=1, max_size=5),
    repair=st.sampled_from([0, 0, 3, 20]),
    anchor=st.sampled_from(["header", "none", "head"]),
    head=st.sampled_from([5, 40, 61]),
    question=st.integers(0, 20),
)


class Traffic(RuleBasedStateMachine):
    """Requests of all kinds, in any order, on a pool that is too small for them."""

    model: Path

    @initialize(
        num_blocks=st.sampled_from([14, 15, 16, 17, 20, 40, 120]),
        lag=st.sampled_from([0, 1]),
        budget=st.sampled_from([16, 40, 256]),
        seats=st.sampled_from([2, 16]),
        policy=st.sampled_from(["fcfs", "priority"]),
        threshold=st.sampled_from([0, 7]),
        pace=st.sampled_from([0, 0, 1, 30]),
        before=st.lists(st.tuples(_DOCUMENTS_PROMPTS, st.sampled_from([1, 2, 30])), min_size=3, max_size=6),
    )
    def start(
        self,
        num_blocks: int,
        lag: int,
        budget: int,
        seats: int,
        policy: str,
        threshold: int,
        pace: int,
        before: list[tuple[SpanPrompt, int]],
    ) -> None:
        """Some have asked already, and went without an answer."""
        self.policy, self.pace = policy, pace
        self.inner: list[tuple[SpanPrompt, list[int]]] = []
        self.asked: list[tuple[SpanPrompt, int]] = []
        self.engine: Any = start(
            self.model,
            num_blocks,
            lag=lag,
            max_model_len=min(256, (num_blocks - 1) * BLOCK),
            max_num_batched_tokens=budget,
            max_num_seqs=seats,
            scheduling_policy=policy,
            long_prefill_token_threshold=threshold,
        )
        self.spans = self.engine.scheduler.spans
        self.spans.residency.clock = lambda: float(len(self.engine.steps))
        for prompt, max_tokens in before:
            self.withdraw(self.send(prompt, max_tokens, lease=Lease()))

    def send(
        self, prompt: SpanPrompt, max_tokens: int, priority: int = 1, lease: Lease | None = None, **options: Any
    ) -> str:
        """Queue a request, and step at this traffic's pace. Its name, or '' where the window is too small for it, or
        so many wait that it would take long until all of them are done."""
        from symbolic_engine import expected

        under_way = sum(not sent.finished for sent in self.engine.sent.values())
        if under_way >= _MOST_UNDER_WAY or len(prompt) + max_tokens > self.engine.scheduler.max_model_len:
            return ""
        options["priority"] = priority if self.policy == "priority" else 0
        name: str = self.engine.send(prompt, max_tokens, lease=lease, **options)
        if not options.get("keep") and options.get("salt") is None:
            self.asked.append((prompt, max_tokens))
            if lease is not None:
                self.inner.append((prompt, expected(prompt, max_tokens)))
        self.run_some(self.pace)
        return name

    @rule(
        prompt=_DOCUMENTS_PROMPTS,
        max_tokens=st.sampled_from([1, 2, 30]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 2),
        lease=_LEASES,
    )
    def ask_documents(
        self, prompt: SpanPrompt, max_tokens: int, salt: str | None, priority: int, lease: Lease | None
    ) -> None:
        self.send(prompt, max_tokens, priority, lease, salt=salt)

    @rule(
        groups=st.integers(1, 3),
        documents=st.integers(1, 2),
        length=st.sampled_from([2, 9, 20]),
        question=st.integers(1, 12),
        max_tokens=st.sampled_from([1, 2, 30]),
        priority=st.integers(0, 2),
        lease=_LEASES,
    )
    def converse(
        self,
        groups: int,
        documents: int,
        length: int,
        question: int,
        max_tokens: int,
        priority: int,
        lease: Lease | None,
    ) -> None:
        self.send(conversation(groups, documents, length, question), max_tokens, priority, lease)

    @rule(
        number=_CHOSEN_DOCUMENTS,
        behind=st.sampled_from([(), HEADER, HEADER]),
        max_tokens=st.sampled_from([1, 1, 30]),
        salt=st.sampled_from([None, None, "a"]),
        priority=st.integers(0, 2),
    )
    def prefetch(self, number: int, behind: tuple[int, ...], max_tokens: int, salt: str | None, priority: int) -> None:
        prompt = SpanPrompt((*behind, *_DOCUMENTS[number]))
        self.send(prompt, max_tokens, priority, salt=salt, keep=True)

    @precondition(lambda self: self.asked)
    @rule(chosen=_CHOSEN, span=_CHOSEN)
    def prefetch_source(self, chosen: int, span: int) -> None:
        """Make what an earlier request, under way maybe, wants made."""
        prompt, _ = _of(self.asked, chosen)
        if prompt.spans:
            wanted = _of(prompt.spans, span)
            tokens = prompt.token_ids[wanted.start : wanted.end - wanted.is_generated]
            self.send(SpanPrompt((*wanted.anchor.token_ids, *tokens), wanted.anchor.spans), 1, keep=True)

    @rule(question=st.integers(0, 60), max_tokens=st.sampled_from([1, 5, 40]), lease=_LEASES)
    def ask_plain(self, question: int, max_tokens: int, lease: Lease | None) -> None:
        prompt = SpanPrompt((*_SYSTEM, *HEADER, *range(300, 300 + question), CLOSING, *ANSWER))
        self.send(prompt, max_tokens, lease=lease)

    @precondition(lambda self: self.inner)
    @rule(
        chosen=st.lists(_CHOSEN, min_size=1, max_size=3),
        documents=st.lists(_CHOSEN_DOCUMENTS, max_size=3),
        gap=st.sampled_from([0, 3, 17]),
        repair=st.sampled_from([0, 3]),
        question=st.integers(0, 9),
        is_adjacent=st.booleans(),
        continues=st.booleans(),
        max_tokens=st.sampled_from([1, 3, 10]),
        lease=_LEASES,
        levels=st.integers(1, 3),
    )
    def judge(self, lease: Lease | None, levels: int, **options: Any) -> None:
        """One that takes over what others have answered by now, or will. Behind the first level they are judges
        themselves, whose callers go as soon as they have come: nothing of them is there."""
        for _ in range(levels - 1):
            self.withdraw(self.take_over(lease=Lease(), **options))
        self.take_over(lease=lease, **options)

    def take_over(
        self,
        chosen: list[int],
        documents: list[int],
        gap: int,
        repair: int,
        question: int,
        is_adjacent: bool,
        continues: bool,
        max_tokens: int,
        lease: Lease | None,
    ) -> str:
        """As much as is served: where it barely is, sources push each other out."""
        inner, name = [_of(self.inner, number) for number in chosen], ""
        while inner and not name:
            side_by_side = is_adjacent and all(one.token_ids[-3] == CLOSING for one, _ in inner)
            prompt = judge_prompt(inner, documents, gap, repair, question, side_by_side, continues)
            num_inner = len(self.inner)
            name = self.send(prompt, max_tokens, lease=lease)
            if name in self.spans.known and self.spans.known[name].exact:
                self.withdraw(name)
                del self.inner[num_inner:]
                name = ""
            documents, inner = documents[:-1], inner if documents else inner[:-1]
        return name

    def withdraw(self, name: str) -> None:
        """Its caller goes, if it is still there."""
        if name in self.engine.sent and not self.engine.sent[name].finished:
            self.engine.abort(name)

    @precondition(lambda self: self.asked)
    @rule(chosen=_CHOSEN, times=st.sampled_from([1, 1, 3]), lease=_LEASES)
    def ask_again(self, chosen: int, times: int, lease: Lease | None) -> None:
        prompt, max_tokens = _of(self.asked, chosen)
        for _ in range(times):
            self.send(prompt, max_tokens, lease=lease)

    @rule(steps=st.sampled_from([1, 2, 3, 6, 40]))
    def run_some(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @rule(chosen=st.integers(0, 30), is_waited_for=st.booleans())
    def abort(self, chosen: int, is_waited_for: bool) -> None:
        under_way = [name for name, sent in self.engine.sent.items() if not sent.finished]
        waited_for = [name for name in self.spans.by_source.values() if name in under_way]
        names = waited_for if is_waited_for and waited_for else under_way
        if names:
            self.engine.abort(_of(names, chosen))

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


def _of(items: Any, number: int) -> Any:
    """One of them, counted from the last on."""
    return items[-1 - number % len(items)]


def test_any_traffic(model_dir: Path) -> None:
    """Every answer is that of its definition, no step leaves a wrong count, and nothing hangs."""
    machine = type("Traffic", (Traffic,), {"model": model_dir})
    run_state_machine_as_test(machine, settings=settings(max_examples=90, stateful_step_count=40))
