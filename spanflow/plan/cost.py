"""What a prompt costs at best and at worst, without a look at any cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spanflow.engine.context import count_span, in_context, source_key
from spanflow.lowering.prompt import SpanPrompt


@dataclass(frozen=True, slots=True)
class Cost:
    """Tokens of a prompt: `moved` from elsewhere, `repaired` (of spans, computed again in context), `computed` in all
    (repaired ones too), and `internal`: computed beside the prompt, for spans that are nowhere yet."""

    moved: int
    repaired: int
    computed: int
    internal: int = 0


def bound(prompt: SpanPrompt, *, are_there: bool) -> Cost:
    """What a prompt costs when the KV of all its spans is there, or when none of it is: bounds, without a look at any
    cache.

    A span that stands in the prompt twice is computed once. What stands before the first span counts as computed with
    the prompt.
    """
    counts = [count_span(prompt, span) for span in prompt.spans]
    moved = sum(count[0] for count in counts)
    repaired = sum(count[1] for count in counts)
    computed = int(in_context(prompt).sum())
    if are_there:
        return Cost(moved, repaired, computed)
    missing: Mapping[bytes, int] = {
        source_key(prompt, span): len(span.anchor) + len(span)
        for span, count in zip(prompt.spans, counts, strict=True)
        if count[0]
    }
    return Cost(moved, repaired, computed, sum(missing.values()))
