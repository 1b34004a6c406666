"""Which tokens of a prompt are computed in full context, and what a span is taken from. No torch."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from spanflow.engine.protocol import EngineRequest, SpanReport
from spanflow.errors import PromptTooLong, QueryError
from spanflow.lowering.prompt import Span, SpanPrompt, span_key

Flags = NDArray[np.bool_]


def taken_range(span: Span) -> tuple[int, int]:
    """The positions `[first, end)` of a prompt whose KV is taken from the span's source; may be empty.

    The first `repair` tokens are computed in context, and so is the last token of a generated span:
    it was sampled last, and no pass of the model ever saw it.
    """
    first = min(span.start + span.repair, span.end)
    end = span.end - 1 if span.is_generated else span.end
    return first, max(first, end)


def stands_where_sampled(prompt: SpanPrompt, number: int) -> bool:
    """Whether a span is an answer behind the very prompt that it was sampled behind, up to what it takes along.

    Then its source has the KV of all that stands before it, as this prompt wants it.
    """
    span = prompt.spans[number]
    if not span.is_generated or len(span.anchor) != span.start:
        return False
    before = effective(span.anchor)
    return before.token_ids == prompt.token_ids[: span.start] and before.spans == prompt.spans[:number]


def in_context(prompt: SpanPrompt, *, last: bool = True) -> Flags:
    """One flag per token: True where its KV is computed in full context.

    `last`: a prompt that is run, and not only stood behind, computes its last token for the logits.
    """
    flags = np.ones(len(prompt), dtype=np.bool_)
    for span in prompt.spans:
        first, end = taken_range(span)
        flags[first:end] = False
    if last and len(prompt):
        flags[-1] = True
    return flags


def count_span(prompt: SpanPrompt, span: Span) -> tuple[int, int, int]:
    """(moved, repaired, computed) tokens of one span of a prompt that is run; they add up to its length."""
    first, end = taken_range(span)
    repaired = first - span.start
    moved = end - first - int(first < end == len(prompt))  # the last token of a prompt is computed for its logits
    return moved, repaired, len(span) - repaired - moved


def computed_whole(span: Span) -> SpanReport | None:
    """The report of a span of which nothing is moved, so that no KV is looked for; None for others."""
    first, end = taken_range(span)
    if first < end:
        return None
    repaired, why = first - span.start, f"nothing of it is moved: all {len(span)} tokens are computed in context"
    return SpanReport(span.start, span.end, "computed", 0, repaired, len(span) - repaired, why)


def effective(prompt: SpanPrompt) -> SpanPrompt:
    """The prompt without spans of which nothing would be moved: these are computed in context and are no spans."""
    kept = tuple(span for span in prompt.spans if computed_whole(span) is None)
    return prompt if len(kept) == len(prompt.spans) else SpanPrompt(prompt.token_ids, kept)


def source_prompt(prompt: SpanPrompt, span: Span) -> SpanPrompt:
    """The prompt whose KV a span is taken from: its anchor, with the anchor's own spans, and its tokens."""
    return span.anchor.followed_by(prompt.tokens(span))


def source_in_context(prompt: SpanPrompt, span: Span) -> Flags:
    """Like `in_context`, of the span's source.

    A generated span was sampled by running its inner prompt, so that prompt's last token was computed in context.
    """
    inner = span.anchor.followed_by(prompt.tokens(span)[: span.num_taken or 0])
    behind = np.ones(len(span.anchor) + len(span) - len(inner), dtype=np.bool_)
    return np.concatenate([in_context(inner, last=span.is_generated), behind])


def source_key(prompt: SpanPrompt, span: Span) -> bytes:
    """What the KV of a span's source depends on besides model, adapter and salt: `span_key`, and how it was run."""
    key = span_key(prompt, span)
    return blake2b(key + b"run", digest_size=16).digest() if span.num_taken == 0 else key


def without_spans(prompt: SpanPrompt) -> SpanPrompt:
    """The same tokens in full attention."""
    return SpanPrompt(prompt.token_ids) if prompt.spans else prompt


def checked_max_tokens(request: EngineRequest, max_model_len: int) -> int:
    """The number of tokens a request may sample. Raises QueryError and PromptTooLong where it cannot be served."""
    where = f"request {request.request_id!r}"
    max_tokens = request.sampling.max_tokens
    if not len(request.prompt):
        raise QueryError(f"{where}: the prompt is empty; an engine needs at least 1 token")
    if max_tokens is None or max_tokens < 1:
        raise QueryError(f"{where}: max_tokens is {max_tokens}; ask for at least 1 token")
    if request.sampling.temperature < 0 or not 0 < request.sampling.top_p <= 1:
        raise QueryError(
            f"{where}: temperature {request.sampling.temperature} or top_p {request.sampling.top_p} is out of range; "
            "temperature is 0 or more, top_p above 0 and at most 1"
        )
    if len(request.prompt) + max_tokens > max_model_len:
        raise PromptTooLong(len(request.prompt), max_tokens, max_model_len, where)
    return max_tokens
