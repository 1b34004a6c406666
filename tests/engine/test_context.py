"""Which tokens are computed in context, counted two ways."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spanflow.engine.context import (
    checked_max_tokens,
    count_span,
    in_context,
    source_in_context,
    source_key,
    source_prompt,
)
from spanflow.engine.protocol import EngineRequest
from spanflow.errors import QueryError
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import Span, SpanPrompt

ANCHOR = SpanPrompt((1, 2, 3))


@st.composite
def prompts(draw: st.DrawFn) -> SpanPrompt:
    tokens, spans = draw(st.integers(0, 5)), []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 8))
        taken = draw(st.none() | st.integers(0, length - 1))
        spans.append(Span(tokens, tokens + length, ANCHOR, draw(st.integers(0, 10)), taken))
        tokens += length + draw(st.integers(0, 3))
    return SpanPrompt(tuple(range(tokens)), tuple(spans))


@given(prompts())
def test_counts_add_up_and_agree_with_the_flags(prompt: SpanPrompt) -> None:
    flags = in_context(prompt)
    assert flags[-1]
    outside = set(range(len(prompt)))
    for span in prompt.spans:
        moved, repaired, computed = count_span(prompt, span)
        assert moved + repaired + computed == len(span)
        assert min(moved, repaired, computed) >= 0
        assert moved == int((~flags[span.start : span.end]).sum())
        assert repaired == min(span.repair, len(span))
        outside -= set(range(span.start, span.end))
    assert all(flags[position] for position in outside)


def test_the_source_of_text_and_of_generated_text() -> None:
    anchor = SpanPrompt((1, 2, 3, 4, 5), (Span(2, 5, ANCHOR, 0),))
    prompt = SpanPrompt((7, 8, 9, 10), (Span(1, 4, anchor, 0),))
    (text,) = prompt.spans
    assert source_prompt(prompt, text) == SpanPrompt((1, 2, 3, 4, 5, 8, 9, 10), anchor.spans)
    assert source_in_context(prompt, text).tolist() == [True, True, False, False, False, True, True, True]
    # the anchor was run as a prompt of its own, so its last token was computed for the logits
    sampled = Span(1, 4, anchor, 0, 0)
    assert source_in_context(prompt, sampled).tolist() == [True, True, False, False, True, True, True, True]
    assert source_key(prompt, text) != source_key(prompt, sampled)


def test_requests_without_a_meaning_are_refused() -> None:
    with pytest.raises(QueryError, match="request 'r': max_tokens is 0; ask for at least 1 token"):
        checked_max_tokens(EngineRequest("r", ANCHOR, Sampling(max_tokens=0)), 100)
    with pytest.raises(QueryError, match=r"temperature 0.0 or top_p 0.0 is out of range"):
        checked_max_tokens(EngineRequest("r", ANCHOR, Sampling(max_tokens=1, top_p=0)), 100)
    assert checked_max_tokens(EngineRequest("r", ANCHOR, Sampling(max_tokens=97)), 100) == 97
