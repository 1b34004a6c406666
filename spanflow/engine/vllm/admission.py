"""A request with a payload comes in: read it, check it, decide whether its spans are served or computed in context."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spanflow.engine.anchors import check_anchors
from spanflow.engine.assembly import Assembly, assemble
from spanflow.engine.context import effective
from spanflow.engine.payload import Ask, decode
from spanflow.engine.vllm.contract import Request, RequestStatus
from spanflow.engine.vllm.look import look
from spanflow.engine.vllm.state import SpanRequest
from spanflow.errors import QueryError
from spanflow.lowering.prompt import Span, SpanPrompt

if TYPE_CHECKING:
    from spanflow.engine.vllm.resolver import Resolver

#: How many tokens and spans the sources of one prompt may have together: the core keeps and looks at each of them.
MOST_TOKENS, MOST_SPANS = 1 << 24, 1 << 18

#: How many sources may be made for a request, for each one that it has, before it is computed with full attention.
MOST_MADE = 4


def admit(spans: Resolver, request: Request, payload: Any) -> None:
    """Make a span request of `request`, before it is queued. A bad payload fails this request alone."""
    tokens = tuple(request.prompt_token_ids or ())
    try:
        ask = decode(payload, tokens)
        prompt = SpanPrompt(tokens, ask.spans)
        check_anchors(prompt, spans.headers, lambda digest: (*tenant(request), digest) in spans.residency.inner_prompts)
    except QueryError as error:
        spans.known[request.request_id] = SpanRequest(request, Ask(), SpanPrompt(tokens), answers={"error": str(error)})
        spans.refuse(request)
        return
    if ask.look:
        look(spans, read(spans, request, ask, prompt))
        spans.refuse(request)
        return
    if ask.lease is not None:
        spans.residency.inner_prompts.keep((*tenant(request), prompt.digest), None)
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
        state.makes = spans.hashing.source_keys(request, state.prompt).key
        spans.by_source.setdefault(state.makes, request.request_id)


def register(spans: Resolver, request: Request, ask: Ask, prompt: SpanPrompt) -> None:
    """Hold a request with spans back until they are resolved, or note why they are computed in context."""
    state = read(spans, request, ask, prompt)
    if state.exact:
        spans.counters["unsupported"] += len(state.prompt.spans)
    elif state.assembly is not None:
        spans.hold(state)


def read(spans: Resolver, request: Request, ask: Ask, prompt: SpanPrompt) -> SpanRequest:
    """What is known of a request: what it is assembled from, or why its spans are computed in context."""
    kept = effective(prompt)
    state = spans.known[request.request_id] = SpanRequest(request, ask, kept)
    if not kept.spans:
        state.answers["unsupported"] = spans.unsupported
        return state
    params = request.sampling_params
    state.exact = why_exact(spans, state, params.max_tokens or 1 if params is not None else 1)
    if not state.exact:
        # The request's own hashes must know of the spans before anybody looks its prefix up.
        rehash(spans, request, kept.spans)
        state.plan(spans.hashing)
    return state


def rehash(spans: Resolver, request: Request, known: Sequence[Span]) -> None:
    """Hash the blocks of a request that has none yet by the spans of its prompt."""
    request.block_hashes.clear()
    request._block_hasher = spans.hashing.hasher(known)
    request.update_block_hashes()


def give_up_stuck(spans: Resolver) -> None:
    """Compute held requests with full attention whose sources push each other out of the pool again and again: those of
    one may take more room than the others leave, though each fits by itself."""
    for state in [state for state in spans.held.values() if state.num_made > MOST_MADE * (1 + len(state.keys))]:
        name = state.request.request_id
        if name in spans.held:  # else it worked for one that was given up
            _give_up(spans, state, name)


def _give_up(spans: Resolver, state: SpanRequest, name: str) -> None:
    if name in spans.internal:  # The last who waited for it has gone, or begins anew.
        spans.scheduler.finish_requests({name}, RequestStatus.FINISHED_ABORTED)
        return
    if spans.by_source.get(state.makes) == name:
        del spans.by_source[state.makes]
    state.makes = None
    state.exact = f"its sources do not fit into the KV pool together: {state.num_made} were made, and pushed out"
    if sampled := state.request.num_output_tokens:  # It ran, and was preempted.
        state.exact += f"; the first {sampled} tokens of its answer were sampled with its spans"
    state.assembly = None
    spans.counters["unsupported"] += sum(not source.is_counted for source in state.sources[1:])
    made_for_it = spans.dependents({name})
    spans.let_go(name)
    rehash(spans, state.request, ())
    spans.scheduler.finish_requests(made_for_it, RequestStatus.FINISHED_ABORTED)


def tenant(request: Request) -> tuple[str | None, str | None]:
    """Salt and adapter: what separates tenants."""
    return request.cache_salt, request.lora_request.lora_name if request.lora_request else None


def why_exact(spans: Resolver, state: SpanRequest, max_tokens: int) -> str:
    """Why the spans of this request's prompt, or of one of its sources, are computed in context, or ''.

    `max_tokens` follow the prompt; a source is materialised with one, whatever its reader asks for.
    """
    request, params = state.request, state.request.sampling_params
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
    window, longest = spans.scheduler.max_model_len, dict[SpanPrompt, int]()
    todo = [(state.prompt, max_tokens)]
    while todo:
        prompt, max_tokens = todo.pop()
        num_tokens = sum(len(span.anchor) + len(span) for span in prompt.spans)
        num_spans = sum(len(span.anchor.spans) for span in prompt.spans)
        if num_tokens > MOST_TOKENS or num_spans > MOST_SPANS:
            most = f"at most {MOST_TOKENS} and {MOST_SPANS} are served"
            return f"its sources have {num_tokens} tokens and {num_spans} spans together; {most}"
        assembly = assemble(prompt, state.make)
        for segment in sorted(assembly.segments[1:], key=lambda segment: len(segment.source), reverse=True):
            anchor, size = prompt.spans[segment.span].anchor, len(segment.source)
            if size + 1 > window:
                return f"a span behind its anchor has {size} tokens, too many for the window of {window}"
            # Behind one anchor all sources are assembled of the same ones, and the longest needs most.
            if segment.source.spans and size > longest.get(anchor, 0):
                longest[anchor] = size
                todo.append((segment.source, 1))
        if why := why_too_big(spans, assembly, len(prompt) + max_tokens):
            return why
    return ""


def why_too_big(spans: Resolver, assembly: Assembly, num_tokens: int) -> str:
    """Why sources and prompt, with `num_tokens` in all, can't be in the pool one after the other, or ''. Depends on
    sizes alone: the same each time.

    Sources are materialised one by one, the others staying where they are; the prompt takes their blocks over where
    there are no more, but for the head's, which it shares with other requests.
    """
    size = spans.block_size
    kept: dict[bytes, int] = {}
    extra = head = 0
    for segment in assembly.segments:
        num_blocks, first = -(-len(segment.source) // size), segment.source_start // size
        kept[segment.source.digest] = max(num_blocks - first, kept.get(segment.source.digest, 0))
        extra = max(extra, first + 1)
        head = head or num_blocks - first
    blocks = max(sum(kept.values()) + extra, -(-num_tokens // size) + head)
    if blocks > spans.num_blocks:
        return f"sources and prompt need {blocks} blocks of the KV pool's {spans.num_blocks}"
    return ""
