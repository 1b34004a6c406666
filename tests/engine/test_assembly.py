"""What is moved, what is computed in context, what is left to prefill: each token exactly once."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from span_prompts import span_prompts

from spanflow.engine.assembly import assemble, behind, source_maker, split, widened
from spanflow.engine.context import effective, in_context, taken_range
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt


def ready(prompt: SpanPrompt) -> SpanPrompt:
    """With a token behind the last span, as lowering leaves it, and something to move."""
    prompt = effective(SpanPrompt((*prompt.token_ids, 7), prompt.spans))
    assume(prompt.spans)
    return prompt


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(span_prompts())
def test_each_token_is_moved_computed_or_left(prompt: SpanPrompt) -> None:
    prompt = ready(prompt)
    whole = assemble(prompt, source_maker())
    ways = [0] * len(prompt)
    for segment in whole.segments:
        for at in range(segment.start, segment.end):
            ways[at] += 1
            assert segment.source.token_ids[at - segment.delta] == prompt.token_ids[at]
    for low, high in whole.ranges:
        for at in range(low, high):
            ways[at] += 1
    assert ways[: whole.suffix] == [1] * whole.suffix
    assert ways[whole.suffix :] == [0] * (len(prompt) - whole.suffix)
    assert whole.suffix < len(prompt)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(span_prompts())
def test_what_is_moved_is_what_the_oracle_moves(prompt: SpanPrompt) -> None:
    """Two readings of the same semantics, written apart; the head is moved from itself, so it does not count."""
    prompt = ready(prompt)
    expected = [not flag for flag in in_context(prompt)]
    found = [False] * len(prompt)
    for segment in assemble(prompt, source_maker()).segments[1:]:
        found[segment.start : segment.end] = [True] * (segment.end - segment.start)
    assert found == expected


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(span_prompts(), st.integers(1, 40))
def test_behind_a_hit_nothing_is_done_twice(prompt: SpanPrompt, num_cached: int) -> None:
    prompt = ready(prompt)
    whole = assemble(prompt, source_maker())
    rest = behind(whole, num_cached)
    assert all(segment.start >= num_cached for segment in rest.segments)
    assert all(low >= num_cached for low, _ in rest.ranges)
    done = sum(s.end - max(s.start, num_cached) for s in whole.segments if s.end > num_cached)
    assert sum(s.end - s.start for s in rest.segments) == done
    for segment in rest.segments:
        assert segment.source.token_ids[segment.source_start] == prompt.token_ids[segment.start]
    assert rest.suffix == max(whole.suffix, num_cached)


def test_parts_of_a_span() -> None:
    """What is not moved, or nothing of it, is computed in context."""
    assert taken_range(Span(4, 9, NO_ANCHOR)) == (4, 9)
    assert taken_range(Span(4, 9, NO_ANCHOR, 2)) == (6, 9)
    assert taken_range(Span(4, 9, NO_ANCHOR, 2, 1)) == (6, 8)
    ids = tuple(range(12))
    assert effective(SpanPrompt(ids, (Span(4, 9, NO_ANCHOR, 5),))) == SpanPrompt(ids)
    assert effective(SpanPrompt(ids, (Span(4, 6, NO_ANCHOR, 1, 1),))) == SpanPrompt(ids)


def test_ranges_are_cut_to_the_threshold() -> None:
    assert split(((0, 10), (20, 24)), 4) == ((0, 4), (4, 8), (8, 10), (20, 24))
    assert split(((0, 10),), 0) == ((0, 10),)


@pytest.mark.parametrize("repair", [0, 3])
def test_an_answer_that_stands_where_it_was_sampled_brings_what_is_before_it(repair: int) -> None:
    """The head, whose own source it has as well, and what stands between it and another span, unless a repair does. A
    text does not, nor an answer behind other spans."""
    ids = tuple(range(100, 150))
    head, text = SpanPrompt(ids[:5]), Span(20, 30, NO_ANCHOR)
    answer = Span(5, 15, head, repair, 3)
    later = Span(40, 48, SpanPrompt(ids[:40], (answer, text)), repair, 3)
    assembly = assemble(SpanPrompt(ids, (answer, text, later)), source_maker())
    assert assembly.continues
    assert [(s.start, s.end, len(s.source), s.brings) for s in assembly.segments] == [
        *((0, 5, 5, 0), (5 + repair, 14, 14, 0), (20, 30, 10, 0), (40 + repair, 47, 47, 0 if repair else 10))
    ]
    assert behind(assembly, 20).segments[-1].brings == (0 if repair else 10)
    if not repair:
        assert [behind(assembly, num).segments[-1].brings for num in (31, 39, 40, 42)] == [9, 1, 0, 0]
        wide = widened(behind(assembly, 33), 0)
        assert [(s.start, s.delta, s.brings) for s in wide.segments] == [(33, 0, 0)]
        assert (wide.ranges, widened(assembly, 3).ranges) == ((), assembly.ranges[:-1])
    for other in (SpanPrompt(ids[:40]), SpanPrompt(ids[1:40], (text,)), SpanPrompt((7, *ids[1:40]), (text,))):
        elsewhere = assemble(SpanPrompt(ids, (text, replace(later, anchor=other))), source_maker())
        assert not elsewhere.continues
        assert elsewhere.segments[-1].brings == 0
    assert not assemble(SpanPrompt(ids, (Span(5, 15, head, repair),)), source_maker()).continues


@pytest.mark.parametrize("repair", [0, 3])
def test_a_judge_of_two(repair: int) -> None:
    """The last sampled token of each candidate and the text between them are one range."""
    inner = SpanPrompt(tuple(range(10)))
    ids = tuple(range(100, 150))
    prompt = SpanPrompt(ids, (Span(5, 15, inner, repair, 3), Span(18, 30, inner, repair, 3)))
    whole = assemble(prompt, source_maker())
    assert whole.ranges == (((5, 8), (14, 21)) if repair else ((14, 18),))
    assert whole.suffix == 29
    assert [segment.delta for segment in whole.segments] == [0, 5 - 10, 18 - 10]
