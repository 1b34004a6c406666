"""What the span scheduler knows of a request, and of the family that computes one assembly."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from spanflow.engine.assembly import Assembly, MakeSource, Range, Segment, assemble, source_maker
from spanflow.engine.context import computed_whole
from spanflow.engine.payload import Ask, pack
from spanflow.engine.protocol import SpanReport, SpanStatus
from spanflow.engine.vllm.contract import Request
from spanflow.engine.vllm.hashing import NO_KEYS, Hashing, SourceKeys
from spanflow.lowering.prompt import NO_ANCHOR, SpanPrompt


@dataclass(slots=True)
class SourceState:
    """One source of a request: its tokens, how it is found, and what became of it.

    `is_taken`: its blocks were given to the request, so that it is no more where it was. `is_counted`: what became of
    it is in the engine's counters.
    """

    prompt: SpanPrompt
    keys: SourceKeys
    status: SpanStatus | None = None
    spawned: bool = False
    is_taken: bool = False
    is_counted: bool = False


@dataclass(slots=True)
class SpanRequest:
    """A request that came with a payload, or an internal one whose prompt has spans.

    `sources` stand in the order of `assembly.segments`; `exact` says why spans are computed in context, where they
    are. `num_made` sources were spawned for it, at any depth. `taken` are the segments whose sources the request took
    over, and how often their keys were rotated so far. `makes` names the source that a prefetch makes of its prompt.
    `make` and `keys` are shared with what is spawned for the request: each source is made and hashed once.
    """

    request: Request
    ask: Ask
    prompt: SpanPrompt
    exact: str = ""
    assembly: Assembly | None = None
    sources: tuple[SourceState, ...] = ()
    taken: list[tuple[Segment, int]] = field(default_factory=list)
    internal_tokens: int = 0
    num_made: int = 0
    num_starved: int = 0
    num_families: int = 0
    answers: dict[str, object] = field(default_factory=dict)
    makes: Hashable = None
    make: MakeSource = field(default_factory=source_maker)
    keys: dict[SpanPrompt, SourceKeys] = field(default_factory=lambda: {NO_ANCHOR: NO_KEYS})

    def plan(self, hashing: Hashing) -> None:
        """Say how the prompt is assembled, and how each of its sources is found."""
        self.assembly = assemble(self.prompt, self.make)
        sources, keys = [segment.source for segment in self.assembly.segments], self.keys
        anchors = [NO_ANCHOR, *(self.make(span.anchor, ()) for span in self.prompt.spans)]
        for source, anchor in zip(sources, anchors, strict=True):
            # What stands behind one anchor begins with the same blocks.
            for prompt, before in ((anchor, NO_ANCHOR), (source, anchor)):
                if prompt not in keys:
                    keys[prompt] = hashing.source_keys(self.request, prompt, keys[before].full)
        self.sources = tuple(SourceState(source, keys[source]) for source in sources)

    def source(self, segment: Segment) -> SourceState:
        """The source that a segment is moved from."""
        return self.sources[segment.span + 1]

    def reports(self) -> tuple[SpanReport, ...]:
        """One report per span of the original prompt."""
        # The first source is the head's; the others stand in the order of the effective prompt's spans.
        sources = dict(zip(self.prompt.spans, self.sources[1:], strict=True)) if self.assembly else {}
        out = []
        for span in self.ask.spans:
            if self.exact:
                out.append(SpanReport(span.start, span.end, "unsupported", computed=len(span), why=self.exact))
            elif (whole := computed_whole(span)) is not None:
                out.append(whole)
            else:
                source = sources[span]
                last = 1 if span.is_generated else 0
                status, num_moved = source.status or "hit", len(span) - span.repair - last
                out.append(SpanReport(span.start, span.end, status, num_moved, span.repair, last, _why(source)))
        return tuple(out)

    def packed(self) -> dict[str, Any]:
        """The report as it travels back."""
        return pack(self.reports(), self.internal_tokens, self.answers)


def _why(source: SourceState) -> str:
    why = {"new": "first seen by this engine", "evicted": "its blocks were reused since"}.get(
        source.status or "hit", ""
    )
    taken = "moved in place, since memory was short" if source.is_taken else ""
    return "; ".join(filter(None, (why, taken)))


@dataclass(slots=True)
class Family:
    """A parent and the virtual requests (by name) that compute its ranges in context, in order of position.

    `makes` are hashes of blocks: who wants them waits for this family instead of making its own.
    """

    parent: Request
    members: dict[str, Range]
    makes: frozenset[bytes] = frozenset()
    fallen: bool = False


@dataclass(slots=True)
class Internal:
    """A request of ours that materialises a source for the span requests in `waiters`."""

    request: Request
    source: Hashable
    waiters: set[str]
