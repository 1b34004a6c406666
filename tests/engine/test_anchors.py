"""Anchors of a prompt from outside: parts of it, headers of the template and leased prompts, and nothing else."""

from __future__ import annotations

import pytest
from counted_tokens import Token, steps_since

from spanflow.engine.anchors import check_anchors
from spanflow.errors import QueryError
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

HEADER = (1, 2)


def why(wanted: SpanPrompt, leased: tuple[SpanPrompt, ...] = ()) -> str:
    """Why a prompt's anchors are refused, or ''."""
    try:
        check_anchors(wanted, {(), HEADER}, {prompt.digest for prompt in leased}.__contains__)
    except QueryError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("anchor", "is_foreign"),
    [
        (NO_ANCHOR, False),
        (SpanPrompt(HEADER), False),
        (SpanPrompt((10, 11, 12)), False),
        (SpanPrompt((11, 12)), False),
        (SpanPrompt((10, 12)), True),
        (SpanPrompt((14, 15)), True),  # stands behind the span's beginning too
        (SpanPrompt((*HEADER, 3)), True),
    ],
)
def test_an_anchor_is_shown_by_the_prompt_or_is_a_header(anchor: SpanPrompt, is_foreign: bool) -> None:
    wanted = SpanPrompt(tuple(range(10, 20)), (Span(5, 8, anchor),))
    assert ("span 0 names a foreign anchor" in why(wanted)) == is_foreign


def test_an_anchor_with_spans_is_the_beginning_of_the_prompt_with_its_spans() -> None:
    ids = tuple(range(10, 30))
    first = Span(3, 6, SpanPrompt(HEADER))
    for anchor, is_foreign in (
        (SpanPrompt(ids[:8], (first,)), False),
        (SpanPrompt(ids[:8], (Span(3, 6, NO_ANCHOR),)), True),
        (SpanPrompt(ids[1:8], (Span(2, 5, SpanPrompt(HEADER)),)), True),
        (SpanPrompt(ids[:12], (first,)), True),
    ):
        assert ("foreign anchor" in why(SpanPrompt(ids, (first, Span(10, 14, anchor))))) == is_foreign


def test_an_answer_is_taken_over_from_a_prompt_that_was_leased() -> None:
    inner = SpanPrompt((40, 41, 42))
    wanted = SpanPrompt(tuple(range(10, 30)), (Span(5, 9, inner, num_taken=3),))
    assert "never ran under a lease" in why(wanted)
    assert why(wanted, (inner.followed_by((15, 16, 17)),)) == ""
    assert "never ran under a lease" in why(wanted, (inner.followed_by((15, 16, 18)),))


def test_an_anchor_is_looked_for_in_as_many_steps_as_there_are_tokens() -> None:
    """Almost all of it stands in the prompt, again and again. Of many spans that name it, one is checked."""
    size = 1000
    ids = tuple(Token(7) for _ in range(3 * size))
    for last, is_foreign in ((8, True), (7, False)):
        anchor = SpanPrompt((*(Token(7) for _ in range(size - 1)), Token(last)))
        spans = tuple(Span(at, at + 1, anchor) for at in range(2 * size, 3 * size - 1))
        steps_since()
        assert ("foreign anchor" in why(SpanPrompt(ids, spans))) == is_foreign
        assert 0 < steps_since() <= 3 * size + 2 * size


def test_an_anchor_is_found_at_whole_tokens_alone() -> None:
    """Ids that share bytes or bits are different ids, also where they are none of any model's."""
    top = 1_114_111
    for ids, anchor in (
        ((256, 256, 256), (1, 0)),
        ((1, 256, 5), (0, 1)),
        ((3, 4, 5), (3 + top, 4)),
        ((3, 4, 5), (3 - top, 4)),
        ((0, 1, 2), (top, 1)),
    ):
        wanted = SpanPrompt((*ids, 9, 9), (Span(3, 4, SpanPrompt(anchor)),))
        assert "foreign anchor of 2 tokens" in why(wanted)
    assert not why(SpanPrompt((top + 5, top + 4, 3, 9, 9), (Span(3, 4, SpanPrompt((top + 4, 3))),)))
