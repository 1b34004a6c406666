"""What travels with a request, in vLLM's `extra_args['spanflow']`, and the report that comes back.

A request's payload is a versioned flat list of ints, its report a small dict of plain values. Neither
needs vLLM: whoever talks to an engine from elsewhere writes and reads them too.

Nested containers do not survive the way between processes, and HTTP allows flat lists only, so
spans, anchors and the request's flags are laid out one after the other:

    VERSION, flags, lease consumers, lease milliseconds,
    number of released prompts, per prompt three ints of its digest,
    number of anchors, per anchor: number of tokens, tokens, number of spans, spans,
    number of spans of the prompt, spans

A span is five ints: start, end, repair, num_taken (-1: text), index of its anchor (-1: none). An
anchor refers only to anchors before it, so no payload can be cyclic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spanflow.engine.protocol import Lease, SpanReport
from spanflow.errors import QueryError
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt

KEY = "spanflow"
VERSION = 1

_LEASE, _AUDIT, _PROBE, _KEEP, _LOOK = 1, 2, 4, 8, 16
_DIGEST_CUTS = ((0, 6), (6, 11), (11, 16))
_SPAN_INTS = 5
_LIMIT = 1 << 62
_MAX_LEASE_SECONDS = 24 * 3600
#: What comes back of a request: spans, internal tokens, and answers to what it asked.
Report = tuple[tuple[SpanReport, ...], int, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Ask:
    """What a request asks of the span engine besides its tokens.

    `audit` asks for counts and `probe` for a comparison of moved with recomputed keys, both answered in
    the request's report; `releases` ends the leases of inner prompts, named by their digests. `keep` makes a source of
    the prompt: later prompts take spans from it. `look` asks what the request would find, and runs nothing.
    """

    spans: tuple[Span, ...] = ()
    lease: Lease | None = None
    audit: bool = False
    probe: bool = False
    keep: bool = False
    look: bool = False
    releases: tuple[bytes, ...] = ()


def encode(ask: Ask) -> list[int]:
    """The flat list for an `Ask`; equal anchors are written once."""
    anchors: list[int] = []
    index: dict[SpanPrompt, int] = {NO_ANCHOR: -1}

    def flat(spans: Sequence[Span]) -> list[int]:
        out = [len(spans)]
        for span in spans:
            taken = -1 if span.num_taken is None else span.num_taken
            out.extend((span.start, span.end, span.repair, taken, index[span.anchor]))
        return out

    todo = [span.anchor for span in reversed(ask.spans)]
    while todo:
        anchor = todo.pop()
        if anchor in index:
            continue
        if missing := [span.anchor for span in anchor.spans if span.anchor not in index]:
            todo += (anchor, *missing)  # Once more, when what it refers to is written.
            continue
        anchors.extend((len(anchor), *anchor.token_ids, *flat(anchor.spans)))
        index[anchor] = len(index) - 1
    spans = flat(ask.spans)
    asked = {_LEASE: ask.lease is not None, _AUDIT: ask.audit, _PROBE: ask.probe, _KEEP: ask.keep, _LOOK: ask.look}
    flags = sum(flag for flag, is_set in asked.items() if is_set)
    releases = [int.from_bytes(digest[a:b], "little") for digest in ask.releases for a, b in _DIGEST_CUTS]
    consumers, millis = (ask.lease.consumers, round(ask.lease.seconds * 1000)) if ask.lease else (0, 0)
    return [VERSION, flags, consumers, millis, len(ask.releases), *releases, len(index) - 1, *anchors, *spans]


class _Reader:
    """Takes ints from the front; every shortfall or odd value is a QueryError that names its place."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = values
        self.at = 0

    def take(self, count: int, what: str) -> tuple[int, ...]:
        values = tuple(self.values[self.at : self.at + count])
        if count < 0 or len(values) < count:
            raise QueryError(
                f"spans payload ends at int {len(self.values)} inside {what} (needs {count} from {self.at})"
            )
        for value in values:
            if type(value) is not int or not -_LIMIT < value < _LIMIT:
                raise QueryError(f"spans payload: {what} holds {value!r}; only ints below 2**62 are allowed")
        self.at += count
        return values

    def one(self, what: str, low: int, high: int) -> int:
        (value,) = self.take(1, what)
        if not low <= value <= high:
            raise QueryError(f"spans payload: {what} is {value}; allowed are {low} to {high}")
        return value

    def digest(self) -> bytes:
        """The digest of a released prompt."""
        parts = []
        for low, high in _DIGEST_CUTS:
            value = self.one("digest of a released prompt", 0, 256 ** (high - low) - 1)
            parts.append(value.to_bytes(high - low, "little"))
        return b"".join(parts)


def decode(payload: Any, token_ids: Sequence[int]) -> Ask:
    """The `Ask` of a payload for a prompt of `token_ids`. Raises QueryError where it does not fit."""
    if not isinstance(payload, list | tuple):
        raise QueryError(f"spans payload: a flat list of ints is wanted, got {type(payload).__name__}")
    reader = _Reader(payload)
    size = len(payload)
    version = reader.one("version", 0, 2**31)
    if version != VERSION:
        raise QueryError(f"spans payload: version {version}; this engine reads version {VERSION}")
    flags = reader.one("flags", 0, _LEASE | _AUDIT | _PROBE | _KEEP | _LOOK)
    consumers = reader.one("lease consumers", 0, 2**20)
    millis = reader.one("lease milliseconds", 0, _MAX_LEASE_SECONDS * 1000)
    releases = tuple(reader.digest() for _ in range(reader.one("number of released prompts", 0, size)))
    anchors: list[SpanPrompt] = []

    def spans(what: str) -> tuple[Span, ...]:
        found = []
        for number in range(reader.one(f"number of spans of {what}", 0, size)):
            start, end, repair, taken, anchor = reader.take(_SPAN_INTS, f"span {number} of {what}")
            if not -1 <= anchor < len(anchors):
                raise QueryError(f"span {number} of {what}: anchor {anchor} is not one of the {len(anchors)} before it")
            if start < 1:
                raise QueryError(
                    f"span {number} of {what} starts at token {start}; at least one token must stand before"
                )
            found.append(
                Span(start, end, NO_ANCHOR if anchor < 0 else anchors[anchor], repair, None if taken < 0 else taken)
            )
        return tuple(found)

    for number in range(reader.one("number of anchors", 0, size)):
        what = f"anchor {number}"
        tokens = reader.take(reader.one(f"length of {what}", 1, size), what)
        anchors.append(SpanPrompt(tokens, spans(what)))
    prompt = SpanPrompt(tuple(token_ids), spans("the prompt"))
    if reader.at != size:
        raise QueryError(f"spans payload: {size - reader.at} ints are left over behind the last span")
    if prompt.spans and prompt.spans[-1].end >= len(prompt):
        raise QueryError(
            f"the last span ends at token {prompt.spans[-1].end}, the end of the prompt; leave one token behind it"
        )
    return Ask(
        spans=prompt.spans,
        lease=Lease(consumers, millis / 1000) if flags & _LEASE else None,
        audit=bool(flags & _AUDIT),
        probe=bool(flags & _PROBE),
        keep=bool(flags & _KEEP),
        look=bool(flags & _LOOK),
        releases=releases,
    )


def pack(reports: Sequence[SpanReport], internal_tokens: int, answers: Mapping[str, object]) -> dict[str, Any]:
    """A report as it travels back, in vLLM's `kv_transfer_params`."""
    spans = [[r.start, r.end, r.status, r.moved, r.repaired, r.computed, r.why] for r in reports]
    return {KEY: {"spans": spans, "internal": internal_tokens, **answers}}


def unpack(params: Mapping[str, Any] | None) -> Report | None:
    """What was packed; None where nothing was."""
    if not params or KEY not in params:
        return None
    body = dict(params[KEY])
    spans = tuple(SpanReport(*fields) for fields in body.pop("spans"))
    return spans, body.pop("internal"), body
