"""Prompts with spans as values: equal where all is equal, made longer, written and copied."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st
from span_prompts import TOKENS, span_prompts

from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt


@given(span_prompts(), st.lists(TOKENS, max_size=5).map(tuple), st.lists(TOKENS, max_size=5).map(tuple))
def test_a_prompt_made_longer_is_the_longer_prompt(
    prompt: SpanPrompt, some: tuple[int, ...], more: tuple[int, ...]
) -> None:
    longer = prompt.followed_by(some).followed_by(more)
    made = SpanPrompt(prompt.token_ids + some + more, prompt.spans)
    assert (longer.token_ids, longer.spans, longer.digest) == (made.token_ids, made.spans, made.digest)
    assert hash(longer) == hash(made)
    assert (longer == prompt) == (not some + more)


@given(span_prompts(), st.data())
def test_a_prompt_is_another_where_anything_is(prompt: SpanPrompt, data: st.DataObject) -> None:
    others = [SpanPrompt((*prompt.token_ids, 0), prompt.spans), SpanPrompt((1, *prompt.token_ids), ())]
    if prompt.spans:
        at = data.draw(st.integers(0, len(prompt.spans) - 1))
        span = prompt.spans[at]
        taken = 0 if span.num_taken is None else None
        changed = [
            Span(span.start, span.end, span.anchor.followed_by((1,)), span.repair, span.num_taken),
            Span(span.start, span.end, span.anchor, span.repair + 1, span.num_taken),
            Span(span.start, span.end, span.anchor, span.repair, taken),
        ]
        others += [SpanPrompt(prompt.token_ids, (*prompt.spans[:at], c, *prompt.spans[at + 1 :])) for c in changed]
        others.append(SpanPrompt(prompt.token_ids, (*prompt.spans[:at], *prompt.spans[at + 1 :])))
    assert len({prompt, *others}) == 1 + len(others)


def test_tokens_are_never_read_as_spans() -> None:
    """What is hashed of a span, as tokens."""
    digest = [int.from_bytes(NO_ANCHOR.digest[at : at + 8], "little", signed=True) for at in (0, 8)]
    with_span = SpanPrompt((5, 6), (Span(0, 1, NO_ANCHOR),))
    assert with_span != SpanPrompt((0, 1, 0, -1, *digest, 5, 6))
    assert with_span != SpanPrompt((1, 0, 1, 0, -1, *digest, 5, 6))


@given(span_prompts())
def test_a_prompt_can_be_sent_to_another_process(prompt: SpanPrompt) -> None:
    again = pickle.loads(pickle.dumps(prompt))
    assert again == prompt
    assert again.followed_by((1,)) == prompt.followed_by((1,))


def test_spans_behind_spans_are_written_in_short() -> None:
    """Written out, each group of documents would be there once for each document of the next one."""
    prompt = SpanPrompt((1, 2))
    for _ in range(40):
        spans = tuple(Span(at, at + 1, prompt) for at in range(4))
        prompt = SpanPrompt((1, 2, 3, 4, 5), spans)
    assert len(repr(prompt)) < 500
