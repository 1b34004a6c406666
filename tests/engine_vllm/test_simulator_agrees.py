"""The simulator counts as the engine does: what it says of a prompt is what the real scheduler comes to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from symbolic_prompts import BLOCK, HEADER, behind, continued, conversation, document, judge, plain, prompt, start

from spanflow.engine.protocol import EngineRequest, Lease, SpanReport
from spanflow.engine.residency import Residency
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import Span, SpanPrompt

pytestmark = pytest.mark.vllm

#: Spans, tokens of the prompt that came from KV, and tokens that were computed beside it.
Counts = tuple[list[tuple[str, int, int, int]], int, int]


class Both:
    """The engine on its real scheduler, and the simulator's cache, each asked the same."""

    def __init__(self, model_dir: Path, num_blocks: int = 200) -> None:
        self.engine = start(model_dir, num_blocks + 1)
        self.cache = Residency(num_blocks, BLOCK, 512, lambda: 0.0)

    def ask(self, asked: SpanPrompt, num_tokens: int = 1, lease: Lease | None = None) -> tuple[Counts, list[int]]:
        """What both say of a prompt, and its answer; fails where they differ, or a look did not foresee it."""
        look = self.engine.sent[self.engine.send(asked, num_tokens, look=True)]
        self.engine.finish()
        name = self.engine.send(asked, num_tokens, lease=lease)
        self.engine.finish()
        sent = self.engine.sent[name]
        found = self.cache.admit_alone(EngineRequest(name, asked, Sampling(num_tokens), lease), num_tokens)
        self.cache.finish(found, tuple(sent.tokens))
        counts = counted(found.spans), found.cached, found.internal
        assert counts == of_engine(sent) == foreseen(look)
        assert not look.tokens
        return counts, sent.tokens


def counted(reports: tuple[SpanReport, ...]) -> list[tuple[str, int, int, int]]:
    return [(report.status, report.moved, report.repaired, report.computed) for report in reports]


def of_engine(sent: Any) -> Counts:
    from spanflow.engine.payload import unpack

    spans, internal, _ = unpack(sent.report) or ((), 0, {})
    return counted(spans), sent.prefill.num_cached_tokens, internal


def foreseen(look: Any) -> Counts:
    """What a look says would become of a request."""
    from spanflow.engine.payload import unpack

    reports = unpack(look.report)
    assert reports is not None
    spans, internal, answers = reports
    return counted(spans), len(look.prompt) - answers["look"], internal


def test_documents_in_new_orders(model_dir: Path) -> None:
    both = Both(model_dir)
    first, second, short = document(0), document(1), document(2, 9)
    assert both.ask(prompt(first, second))[0] == ([("new", 40, 0, 0)] * 2, 88, 8 + 43 + 43)
    assert both.ask(prompt(second, first))[0] == ([("hit", 40, 0, 0)] * 2, 88, 0)
    assert both.ask(prompt(first, second))[0][2] == 0
    assert both.ask(prompt(short, first, short, repair=4))[0][2] == 12
    assert both.ask(prompt(second, short, question=30))[0][0][1] == ("hit", 9, 0, 0)
    assert both.ask(prompt(first, repair=40))[0] == ([("computed", 0, 40, 0)], 0, 0)


def test_plain_prompts(model_dir: Path) -> None:
    both = Both(model_dir)
    assert both.ask(plain(1, 40))[0] == ([], 0, 0)
    assert both.ask(plain(1, 40))[0] == ([], 32, 0)
    assert both.ask(plain(2, 32))[0] == ([], 0, 0)


def test_an_answer_that_is_taken_over(model_dir: Path) -> None:
    both = Both(model_dir)
    inner = prompt(document(0), document(1, 20))
    _, answer = both.ask(inner, 9, Lease())
    counts, _ = both.ask(judge(inner, answer))
    assert counts == ([("hit", 10, 0, 1)], 10, 0)
    assert both.engine.scheduler.audit()["leases"] == len(both.cache.leases) == 0
    again = judge(inner, answer)
    assert both.ask(SpanPrompt((3, *again.token_ids[1:]), again.spans))[0] == ([("evicted", 10, 0, 1)], 13, 3 + 8)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("length", range(24, 24 + BLOCK, 3))
def test_a_prompt_that_continues_an_inner_one(model_dir: Path, length: int, has_documents: bool) -> None:
    """The answer brings what is before it; another one, behind other text, does not, nor does one that is repaired."""
    both = Both(model_dir)
    inner = [prompt(document(n, 20), document(n + 3, 20), question=length) for n in range(2)]
    if not has_documents:
        inner = [plain(n, length) for n in range(2)]
    answers = [both.ask(one, 13, Lease(consumers=2))[1] for one in inner]
    for repair in (0, 3):
        asked = continued(inner, answers)
        (first, *_), spans = asked.spans[-2:], asked.spans
        repaired = SpanPrompt(asked.token_ids, (*spans[:-2], replace(first, repair=repair), spans[-1]))
        (reports, cached, internal), _ = both.ask(repaired)
        assert reports[-2:] == [("hit", 14 - repair, repair, 1), ("hit", 14, 0, 1)]
        assert internal == 0
        if not has_documents:
            assert cached == length + 12 + 14 - repair
    both.engine.scheduler.reset_prefix_cache()
    both.cache.reset()
    (reports, _, _), _ = both.ask(continued(inner, answers))
    assert reports[-2:] == [("evicted", 14, 0, 1), ("evicted", 14, 0, 1)]


@pytest.mark.parametrize("head", [8, 21, 32])
def test_a_head_that_is_new(model_dir: Path, head: int) -> None:
    """Beside missing documents it is made like them; alone it is computed with its prompt, and is found there."""
    both = Both(model_dir)
    assert both.ask(behind(11, document(0)))[0][1:] == (11 + 40, 11 + 43)
    assert both.ask(behind(head, document(0)))[0][1:] == (40, 0)
    assert both.ask(behind(head, document(2, 30)))[0][1:] == (head + 30, 33)
    assert both.ask(behind(head, document(2, 30), document(0)))[0][1:] == (head + 70, 0)
    assert both.ask(behind(head, document(1)))[0][1:] == (head + 40, 43)
    assert both.ask(behind(head, document(1), document(0)))[0][1:] == (head + 80, 0)


def test_a_prompt_that_cannot_be_served(model_dir: Path) -> None:
    """Its spans would fit, but for one of them."""
    both = Both(model_dir)
    tokens, header = tuple(range(100, 611)), SpanPrompt(HEADER)
    two = SpanPrompt(tokens, (Span(1, 5, header), Span(5, 510, header)))
    assert both.ask(two)[0] == ([("new", 4, 0, 0), ("new", 505, 0, 0)], 510, 1 + 7 + 508)
    one = SpanPrompt(tokens, (Span(1, 510, header),))
    assert both.ask(one)[0] == ([("unsupported", 0, 0, 509)], 0, 0)


@pytest.mark.parametrize("length", [6, 20])
@pytest.mark.parametrize("documents", [1, 2])
def test_a_conversation(model_dir: Path, documents: int, length: int) -> None:
    """What stands behind the beginning of a prompt makes that beginning's blocks, which the prompt finds then.

    (Where the moved part of a beginning fills no block, what is made in one step computes the rest of it once each.)
    """
    both = Both(model_dir)
    for groups in (1, 2, 4):
        both.ask(conversation(groups, documents, length, question=16))
        both.engine.scheduler.reset_prefix_cache()
        both.cache.reset()
    both.ask(conversation(4, documents, length, question=16))
    assert both.ask(conversation(4, documents, length, question=16))[0][2] == 0
