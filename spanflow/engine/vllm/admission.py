"""A request with a payload comes in: read it, check it, decide whether its spans are served or computed in context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spanflow.engine.vllm.assembly import assemble, effective
from spanflow.engine.vllm.contract import Request
from spanflow.engine.vllm.hashing import BlockHasher, source_keys
from spanflow.engine.vllm.payload import Ask, decode
from spanflow.engine.vllm.state import SourceState, SpanRequest
from spanflow.errors import QueryError
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver


def admit(spans: Resolver, request: Request, payload: Any) -> None:
    """Make a span request of `request`, before it is queued. A bad payload fails this request alone."""
    tokens = tuple(request.prompt_token_ids or ())
    try:
        ask = decode(payload, tokens)
        prompt = SpanPrompt(tokens, ask.spans)
        for number, span in enumerate(prompt.spans):
            check_anchor(spans, request, prompt, number, span)
    except QueryError as error:
        spans.known[request.request_id] = SpanRequest(request, Ask(), SpanPrompt(tokens), answers={"error": str(error)})
        spans.refuse(request)
        return
    if ask.lease is not None:
        spans.residency.remember_inner(*tenant(request), prompt.digest)
    for digest in ask.releases:
        spans.residency.release((*tenant(request), digest))
    register(spans, request, ask, prompt)
    if ask.keep:
        expect(spans, request)


def expect(spans: Resolver, request: Request) -> None:
    """Let readers wait for what this request is about to make, unless somebody makes it already.

    Only where it ends with its prompt: nobody waits for an answer, or for what a client may hold open.
    """
    state, params = spans.known[request.request_id], request.sampling_params
    if state.exact or request.resumable or params is None:
        return
    if params.max_tokens == 1 and not params.structured_outputs:
        state.makes = source_keys(request, state.prompt, spans.block_size, spans.hash_fn).key
        spans.by_source.setdefault(state.makes, request.request_id)


def register(spans: Resolver, request: Request, ask: Ask, prompt: SpanPrompt) -> None:
    """Hold a request with spans back until they are resolved, or note why they are computed in context."""
    kept = effective(prompt)
    state = SpanRequest(request, ask, kept)
    spans.known[request.request_id] = state
    if not kept.spans:
        state.answers["unsupported"] = spans.unsupported
        return
    params = request.sampling_params
    state.exact = why_exact(spans, request, kept, params.max_tokens or 1 if params is not None else 1)
    if state.exact:
        return
    state.assembly = assemble(kept)
    sources = [segment.source for segment in state.assembly.segments]
    state.sources = tuple(
        SourceState(source, source_keys(request, source, spans.block_size, spans.hash_fn)) for source in sources
    )
    # The request's own hashes must know of the spans before anybody looks its prefix up.
    request.block_hashes.clear()
    request._block_hasher = BlockHasher(spans.block_size, spans.hash_fn, kept.spans)
    request.update_block_hashes()
    spans.hold(state)


def tenant(request: Request) -> tuple[str | None, str | None]:
    """Salt and adapter: what separates tenants."""
    return request.cache_salt, request.lora_request.lora_name if request.lora_request else None


def why_exact(spans: Resolver, request: Request, prompt: SpanPrompt, max_tokens: int) -> str:
    """Why the spans of this request's prompt, or of one of its sources, are computed in context, or ''.

    `max_tokens` follow the prompt; a source is materialised with one, whatever its reader asks for.
    """
    params = request.sampling_params
    if spans.unsupported:
        return spans.unsupported
    if params is not None and params.prompt_logprobs is not None:
        return "log-probabilities of the prompt need every token computed"
    if request.skip_reading_prefix_cache:
        return "the request does not read the prefix cache"
    if request.mm_features or request.prompt_embeds is not None:
        return "the prompt is not made of token ids alone"
    if request.resumable:
        return "the request is a resumable session"
    for segment in assemble(prompt).segments:
        source = segment.source
        if len(source) + 1 > spans.scheduler.max_model_len:
            window = spans.scheduler.max_model_len
            return f"a span behind its anchor has {len(source)} tokens, too many for the window of {window}"
        if source.spans and (why := why_exact(spans, request, source, 1)):
            return why
    return why_too_big(spans, prompt, max_tokens)


def why_too_big(spans: Resolver, prompt: SpanPrompt, max_tokens: int) -> str:
    """Why sources and prompt can't be in the pool one after the other, or ''. Depends on sizes alone: the same each
    time.

    Sources are materialised one by one, the others staying where they are; the prompt takes their blocks over where
    there are no more, but for the head's, which it shares with other requests.
    """
    size = spans.block_size
    kept: dict[bytes, int] = {}
    extra = head = 0
    for segment in assemble(prompt).segments:
        num_blocks, first = -(-len(segment.source) // size), segment.source_start // size
        kept[segment.source.digest] = max(num_blocks - first, kept.get(segment.source.digest, 0))
        extra = max(extra, first + 1)
        head = head or -(-segment.end // size)
    blocks = max(sum(kept.values()) + extra, -(-(len(prompt) + max_tokens) // size) + head)
    if blocks > spans.num_blocks:
        return f"sources and prompt need {blocks} blocks of the KV pool's {spans.num_blocks}"
    return ""


def check_anchor(spans: Resolver, request: Request, prompt: SpanPrompt, number: int, span: Span) -> None:
    """An anchor must be a part of this prompt, a header of the model's template, or a leased inner prompt.

    Anything else would let a payload put text before the model that the prompt does not show.
    Raises QueryError.
    """
    anchor = span.anchor
    if span.is_generated:
        taken = prompt.token_ids[span.start : span.start + (span.num_taken or 0)]
        inner = SpanPrompt(anchor.token_ids + taken, anchor.spans)
        if (*tenant(request), inner.digest) in spans.residency.inner_prompts:
            return
        raise QueryError(
            f"span {number} takes over the output of an inner prompt that this tenant never ran under a lease"
        )
    if anchor == NO_ANCHOR or (not anchor.spans and anchor.token_ids in spans.headers):
        return
    before = SpanPrompt(prompt.token_ids[: len(anchor)], tuple(s for s in prompt.spans if s.end <= len(anchor)))
    if len(anchor) <= span.start and anchor == before:
        return
    if not anchor.spans and _within(anchor.token_ids, prompt.token_ids[: span.start]):
        return
    raise QueryError(
        f"span {number} names a foreign anchor of {len(anchor)} tokens: it is neither a part of the prompt before "
        "the span, nor a header of the chat template, nor a leased prompt"
    )


def _within(needle: tuple[int, ...], tokens: tuple[int, ...]) -> bool:
    """Whether `needle` stands somewhere in `tokens`."""
    width = len(needle)
    return any(tokens[at : at + width] == needle for at in range(len(tokens) - width + 1) if tokens[at] == needle[0])
