"""Random prompts with spans, also behind assembled anchors."""

from __future__ import annotations

from hypothesis import strategies as st

from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

TOKENS = st.integers(0, 49_151)


@st.composite
def span_prompts(draw: st.DrawFn, depth: int = 2) -> SpanPrompt:
    """Prompts with spans whose anchors may be assembled prompts themselves."""
    tokens = tuple(draw(st.lists(TOKENS, min_size=4, max_size=24)))
    edges = sorted(draw(st.sets(st.integers(1, len(tokens) - 1), max_size=6)))
    spans = []
    for start, end in zip(edges[::2], edges[1::2], strict=False):
        kind = draw(st.sampled_from(["none", "plain", "assembled"]))
        anchor = NO_ANCHOR
        if kind == "plain":
            anchor = SpanPrompt(tuple(draw(st.lists(TOKENS, min_size=1, max_size=5))))
        elif kind == "assembled" and depth:
            anchor = draw(span_prompts(depth - 1))
        taken = draw(st.one_of(st.none(), st.integers(0, end - start - 1)))
        spans.append(Span(start, end, anchor, draw(st.integers(0, end - start)), taken))
    return SpanPrompt(tokens, tuple(spans))
