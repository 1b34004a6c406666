"""How a prompt with spans is put together: what is moved, what is computed in context, what is left to prefill.

Pure arithmetic on positions; knows neither blocks nor vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from spanflow.engine.context import effective, stands_where_sampled, taken_range
from spanflow.lowering.prompt import SpanPrompt

Range = tuple[int, int]
MakeSource = Callable[[SpanPrompt, tuple[int, ...]], SpanPrompt]


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens `[start, end)` of the prompt, moved from position `source_start` of `source` on.

    `source` is the anchor and the span up to its last moved token. `span` is its number, -1 the head. `source` has the
    `brings` tokens of the prompt before `start` as well.
    """

    start: int
    end: int
    source: SpanPrompt
    source_start: int
    span: int
    brings: int = 0

    @property
    def delta(self) -> int:
        """By how many positions the keys are rotated."""
        return self.start - self.source_start

    def widened(self) -> Segment:
        """With what it brings."""
        return Segment(self.start - self.brings, self.end, self.source, self.source_start - self.brings, self.span)


@dataclass(frozen=True, slots=True)
class Assembly:
    """A prompt as moved segments, ranges to compute in context, and the position where plain prefill goes on.

    `continues`: the first span is an answer that stands where it was sampled, so that its source begins with the head.
    """

    segments: tuple[Segment, ...]
    ranges: tuple[Range, ...]
    suffix: int
    continues: bool = False


def source_maker() -> MakeSource:
    """Makes what `tokens` behind an anchor are moved from, each once, and what is there of each anchor once."""
    before = cache(effective)
    return cache(lambda anchor, tokens: before(anchor).followed_by(tokens))


def assemble(prompt: SpanPrompt, make: MakeSource) -> Assembly:
    """The assembly of an `effective` prompt that has at least one span."""
    head = prompt.spans[0].start
    segments = [Segment(0, head, SpanPrompt(prompt.token_ids[:head]), 0, -1)]
    for number, span in enumerate(prompt.spans):
        start, end = taken_range(span)
        source = make(span.anchor, prompt.token_ids[span.start : end])
        brings = start - segments[-1].end if number and not span.repair and stands_where_sampled(prompt, number) else 0
        segments.append(Segment(start, end, source, len(span.anchor) + start - span.start, number, brings))
    ranges = tuple((a.end, b.start) for a, b in pairwise(segments) if a.end < b.start)
    return Assembly(tuple(segments), ranges, segments[-1].end, stands_where_sampled(prompt, 0))


def behind(assembly: Assembly, num_cached: int) -> Assembly:
    """What is still to do where the first `num_cached` tokens are already there."""
    if not num_cached:
        return assembly
    segments = tuple(
        Segment(low, s.end, s.source, s.source_start + low - s.start, s.span, min(s.brings, low - num_cached))
        for s in assembly.segments
        if (low := max(s.start, num_cached)) < s.end
    )
    ranges = tuple((max(a, num_cached), b) for a, b in assembly.ranges if b > num_cached)
    return replace(assembly, segments=segments, ranges=ranges, suffix=max(assembly.suffix, num_cached))


def widened(todo: Assembly, number: int) -> Assembly:
    """The same where a segment is moved with what it brings, which is then computed by nobody."""
    segments, start = list(todo.segments), todo.segments[number].start
    segments[number] = segments[number].widened()
    return replace(todo, segments=tuple(segments), ranges=tuple(r for r in todo.ranges if r[1] != start))


def with_head_in_context(todo: Assembly, num_cached: int) -> Assembly:
    """The same where the head, the first segment, is computed with the ranges and not moved."""
    first = todo.segments[1].start
    ranges = ((num_cached, first), *(r for r in todo.ranges if r[0] >= first))
    return replace(todo, segments=todo.segments[1:], ranges=ranges)


def split(ranges: tuple[Range, ...], limit: int) -> tuple[Range, ...]:
    """The same ranges in pieces of at most `limit` tokens (0: no limit)."""
    if limit <= 0:
        return ranges
    return tuple((low, min(low + limit, end)) for start, end in ranges for low in range(start, end, limit))
