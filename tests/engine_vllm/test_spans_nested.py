"""Spans behind spans: what is assembled of sources that are themselves assembled costs what it has of them, each once.

What is counted is work, not time: with the first groups of a conversation below there were 5 ** 12 sources to walk.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from counted_tokens import Token, steps_since
from symbolic_prompts import ANSWER, HEADER, conversation, document, judge, plain, prompt, start

from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

pytestmark = pytest.mark.vllm


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, limit: int) -> Callable[[], int]:
    """How often a function is called from now on; the call beyond `limit` fails, or a test might never end."""
    calls = itertools.count(1)
    real, so_far = getattr(owner, name), [0]

    def count(*args: Any) -> Any:
        so_far[0] = next(calls)
        assert so_far[0] <= limit, f"{name} is called once more than {limit} times"
        return real(*args)

    monkeypatch.setattr(owner, name, count)
    return lambda: so_far[0]


def watched(engine: Any) -> list[int]:
    """How many requests that materialise sources there are in each step from now on, once it is scheduled."""
    real, found = engine.scheduler.schedule, []

    def schedule() -> Any:
        output = real()
        found.append(sum(name.startswith("spanflow-source") for name in engine.scheduler.requests))
        return output

    engine.scheduler.schedule = schedule
    return found


def nested(depth: int) -> tuple[SpanPrompt, list[bytes]]:
    """A prompt that takes an answer over, whose prompt took one over, and so on; and the digests of these prompts."""
    inner, digests = plain(0, 6), []
    for number in range(depth):
        digests.append(inner.digest)
        inner = judge(inner, [number % 900, number // 900, 5])
    return inner, digests


def test_a_conversation_is_admitted_in_steps_that_add_up(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 groups of 4 documents: each head is looked at once, each source is hashed once, and one group is made at a
    time."""
    from spanflow.engine.vllm import admission, state
    from spanflow.engine.vllm.hashing import Hashing

    engine = start(model_dir, 300)
    wanted = conversation(12, 4)
    # The prompt and 11 heads that have spans are looked at; the prompt is planned, and what is spawned for it.
    looked_at = counted(monkeypatch, admission, "assemble", 1 + 11)
    planned = counted(monkeypatch, state, "assemble", 1 + 44)
    hashed = counted(monkeypatch, Hashing, "source_keys", 200)
    name = engine.send(wanted)
    assert (looked_at(), planned(), hashed()) == (1 + 11, 1, 48 + 12)
    under_way = watched(engine)
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"] * 48
    assert max(under_way) == 5  # the head and the first group
    # Each source is named once more when it ends.
    assert (looked_at(), planned(), hashed()) == (1 + 11, 1 + 44, 60 + 49)
    assert engine.scheduler.spans.counters["sources"] == 49


def test_a_conversation_goes_on_at_its_end(model_dir: Path) -> None:
    """The next turn makes its own documents, and no other anew."""
    engine = start(model_dir, 300)
    engine.send(conversation(5, 3))
    engine.finish()
    name = engine.send(conversation(6, 3))
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["hit"] * 15 + ["new"] * 3
    assert engine.scheduler.spans.counters["sources"] == 1 + 15 + 3


def test_what_is_behind_one_anchor_is_hashed_from_its_end_on(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spanflow.engine.vllm import hashing

    engine = start(model_dir, 300, max_model_len=1024)
    header = tuple(range(500, 500 + 30 * 16))
    ids = (1, *header, *(token for number in range(20) for token in document(number, 16)), 5)
    spans = tuple(Span(at, at + 16, SpanPrompt(header)) for at in range(481, 801, 16))
    hashed = counted(monkeypatch, hashing, "hash_block_tokens", 200)
    name = engine.send(SpanPrompt(ids, spans))
    # The prompt itself, its head, the anchor, and a block of each source.
    assert hashed() == len(ids) // 16 + 30 + 30 + 20
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"] * 20


@pytest.mark.parametrize("groups", [24, 200])
def test_a_chain_of_spans_is_served(model_dir: Path, groups: int) -> None:
    """Each stands behind all that were before it. What else is asked meanwhile is answered as if there were none."""
    engine = start(model_dir, 1000, max_model_len=1024)
    name = engine.send(conversation(groups, 1, 2, 1))
    other = engine.send(prompt(document(0)))
    under_way = watched(engine)
    for _ in range(6):
        engine.step()
    assert max(under_way) <= 3  # the head, the first of the chain, and the other one's
    assert engine.sent[other].finished
    if groups > 100:  # what it must answer takes seconds to tell
        engine.abort(name)
    engine.finish()
    engine.check()
    if groups < 100:
        assert engine.statuses(name) == ["new"] * groups


def test_answers_that_are_nested_deeper_than_python_calls(model_dir: Path) -> None:
    engine = start(model_dir, 4000)
    wanted, digests = nested(1500)
    for digest in digests:
        engine.scheduler.spans.residency.inner_prompts.keep((None, None, digest), None)
    name = engine.send(wanted)
    other = engine.send(prompt(document(0)))
    under_way = watched(engine)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.spans.known[name].exact == ""
    assert under_way == [2 + 2, 2, 3, 4]  # the other one's, then a level more each step
    assert engine.sent[other].finished
    engine.abort(name)
    engine.finish()
    engine.check()


@pytest.mark.parametrize("most", ["MOST_TOKENS", "MOST_SPANS"])
def test_sources_that_are_too_much_together_are_not_made(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    """Documents by the thousand behind as many others: what they cost grows with both."""
    from spanflow.engine.vllm import admission

    wanted = conversation(3, 2)
    cost = {
        "MOST_TOKENS": sum(len(span.anchor) + len(span) for span in wanted.spans),
        "MOST_SPANS": sum(len(span.anchor.spans) for span in wanted.spans),
    }
    engine = start(model_dir, 100)
    monkeypatch.setattr(admission, most, cost[most])
    name = engine.send(wanted)
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"] * 6
    monkeypatch.setattr(admission, most, cost[most] - 1)
    name = engine.send(wanted)
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["unsupported"] * 6
    reason = f"{cost['MOST_TOKENS']} tokens and {cost['MOST_SPANS']} spans together; at most "
    assert reason in engine.whys(name)[0]
    assert str(cost[most] - 1) in engine.whys(name)[0]


def test_no_more_sources_are_spawned_than_can_run(model_dir: Path) -> None:
    engine = start(model_dir, 120, max_num_seqs=3)
    name = engine.send(prompt(*[document(number, 12) for number in range(10)]))
    under_way = watched(engine)
    engine.finish()
    engine.check()
    assert max(under_way) == 3
    assert engine.statuses(name) == ["new"] * 10


def test_the_spans_of_a_block_are_found_in_few_looks(model_dir: Path) -> None:
    """Whatever number of them the prompt has."""
    from types import SimpleNamespace

    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from spanflow.engine.vllm.hashing import Hashing

    class Spans(Sequence[Span]):
        def __init__(self, spans: tuple[Span, ...]) -> None:
            self.spans, self.num_looks = spans, 0

        def __len__(self) -> int:
            return len(self.spans)

        def __getitem__(self, at: Any) -> Any:
            self.num_looks += 1
            return self.spans[at]

    hash_fn = get_hash_fn_by_name("sha256")
    init_none_hash(hash_fn)
    tenant: Any = SimpleNamespace(cache_salt=None, lora_request=None, mm_features=[], prompt_embeds=None)
    tokens = tuple(range(32 * 128))
    spans = Spans(tuple(Span(at, at + 1, NO_ANCHOR) for at in range(1, len(tokens), 2)))
    hashes = Hashing(32, hash_fn).chain(tenant, tokens, spans, ())
    assert len(hashes) == 128
    assert spans.num_looks <= 128 * (2 * 12 + 1)
    # A change of the last span changes the last block alone.
    other = (*spans.spans[:-1], Span(len(tokens) - 1, len(tokens), NO_ANCHOR, 1))
    assert [a == b for a, b in zip(hashes, Hashing(32, hash_fn).chain(tenant, tokens, other, ()), strict=True)] == [
        *[True] * 127,
        False,
    ]


def test_a_short_document_is_found_among_thousands() -> None:
    """All that fill no block behind one header have the same prefix."""
    from vllm.v1.core.block_pool import BlockPool

    from spanflow.engine.vllm.residency import Residency

    found = Residency(BlockPool(1002, enable_caching=True, hash_block_size=16))

    def tokens(number: int) -> tuple[int, ...]:
        return tuple(map(Token, (*HEADER, number, *ANSWER)))

    for number, block in enumerate(found.pool.get_new_blocks(1000)):
        found.keep(b"prefix", tokens(number), block)
    steps_since()
    for number in range(1000):
        tail = found.tail(b"prefix", tokens(number)[:4])
        assert tail is not None
        assert tail.tokens[3] == number
    assert found.tail(b"prefix", tokens(1000)) is None
    assert steps_since() <= 1000 * 20
    found.pool.get_new_blocks(1001)
    assert (found.tails, found.by_block) == ({}, {})
