"""Which anchors a prompt from outside may name: nothing is put before the model that the prompt does not show."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Callable, Container
from functools import cache, partial

from spanflow.errors import QueryError
from spanflow.lowering.prompt import Span, SpanPrompt


def check_anchors(prompt: SpanPrompt, headers: Container[tuple[int, ...]], was_leased: Callable[[bytes], bool]) -> None:
    """Each anchor must be a part of this prompt, one of the template's `headers`, or an inner prompt that the same
    tenant ran under a lease, as `was_leased` says of its digest. Raises QueryError.
    """
    text, believed = cache(partial(_spell, prompt.token_ids)), set()
    for number, span in enumerate(prompt.spans):
        anchor, taken = span.anchor, None
        if span.num_taken is not None:
            taken = prompt.token_ids[span.start : span.start + span.num_taken]
        if (anchor, taken) in believed:
            continue  # More of the prompt stands before this span than before the one that named it first.
        believed.add((anchor, taken))
        if taken is not None:
            if not was_leased(anchor.followed_by(taken).digest):
                raise QueryError(
                    f"span {number} takes over the output of an inner prompt that this tenant never ran under a lease"
                )
        elif (anchor.spans or anchor.token_ids not in headers) and not _is_part(prompt, span, text):
            raise QueryError(
                f"span {number} names a foreign anchor of {len(anchor)} tokens: it is neither a part of the prompt "
                "before the span, nor a header of the chat template, nor a leased prompt"
            )


def _is_part(prompt: SpanPrompt, span: Span, text: Callable[[], str]) -> bool:
    """Whether the anchor of a span is the prompt's beginning with its spans, or has none and stands before the span."""
    anchor, size = span.anchor, len(span.anchor)
    if anchor.spans:
        before = prompt.spans[: bisect_right(prompt.spans, size, key=lambda span: span.end)]
        return size <= span.start and anchor == SpanPrompt(prompt.token_ids[:size], before)
    at = text().find(_spell(anchor.token_ids), 0, span.start)
    return at >= 0 and prompt.token_ids[at : at + size] == anchor.token_ids


def _spell(tokens: tuple[int, ...]) -> str:
    """A character for each token, since strings are searched in linear time."""
    return "".join(chr(token % sys.maxunicode) for token in tokens)
