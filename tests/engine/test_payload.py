"""The flat list of ints: what is encoded is decoded, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from span_prompts import span_prompts

from spanflow.engine.payload import Ask, decode, encode, pack, unpack
from spanflow.engine.protocol import Lease, SpanReport, SpanStatus
from spanflow.errors import QueryError
from spanflow.lowering.prompt import Span, SpanPrompt

#: Also those that no array of 64 bits holds.
INTS = st.one_of(st.integers(), st.sampled_from([2**62, 2**63, -(2**63) - 1, 2**64]))


@given(
    span_prompts(),
    st.one_of(st.none(), st.builds(Lease, st.integers(1, 99), st.integers(0, 9999).map(float))),
    st.fixed_dictionaries(dict.fromkeys(("audit", "probe", "keep", "look"), st.booleans())),
    st.lists(st.binary(min_size=16, max_size=16), max_size=3).map(tuple),
)
def test_round_trip(
    prompt: SpanPrompt, lease: Lease | None, flags: dict[str, bool], releases: tuple[bytes, ...]
) -> None:
    ask = Ask(prompt.spans, lease, releases=releases, **flags)
    payload = encode(ask)
    assert all(type(value) is int and abs(value) < 2**62 for value in payload)
    read = decode(payload, prompt.token_ids)
    assert replace(read, spans=ask.spans) == ask
    assert SpanPrompt(prompt.token_ids, read.spans) == prompt


@given(
    st.lists(
        st.builds(
            SpanReport,
            *[st.integers(0)] * 2,
            st.sampled_from(get_args(SpanStatus)),
            *[st.integers(0)] * 3,
            why=st.text(),
        ),
        max_size=3,
    ).map(tuple),
    st.integers(0),
)
def test_a_report_comes_back_as_it_was_sent(reports: tuple[SpanReport, ...], internal: int) -> None:
    sent = json.loads(json.dumps(pack(reports, internal, {"unsupported": "why"})))
    assert unpack(sent) == (reports, internal, {"unsupported": "why"})
    assert unpack({"another connector's": {}}) is None
    assert unpack(None) is None


@given(span_prompts(), st.data())
def test_a_damaged_payload_is_refused_or_fits(prompt: SpanPrompt, data: st.DataObject) -> None:
    """Cut, lengthened or changed anywhere: a QueryError, or spans that fit the prompt; never anything else."""
    payload: list[Any] = encode(Ask(prompt.spans))
    at = data.draw(st.integers(0, len(payload) - 1))
    match data.draw(st.sampled_from(["cut", "change", "insert"])):
        case "cut":
            payload = payload[:at]
        case "change":
            payload[at] = data.draw(st.one_of(INTS, st.none(), st.floats(), st.text(), st.booleans()))
        case _:
            payload.insert(at, data.draw(INTS))
    try:
        ask = decode(payload, prompt.token_ids)
    except QueryError:
        return
    assert all(1 <= span.start < span.end < len(prompt) for span in ask.spans)


def test_equal_anchors_are_written_once() -> None:
    anchor = SpanPrompt(tuple(range(100)))
    spans = tuple(Span(10 * n + 1, 10 * n + 9, anchor) for n in range(8))
    assert len(encode(Ask(spans))) < 200


def test_anchors_may_be_nested_deeper_than_python_calls() -> None:
    """And what they share is read once, however many ways lead to it."""
    anchor = SpanPrompt((1, 2))
    for number in range(3000):
        spans = (Span(1, 2, anchor), Span(2, 3, anchor, number % 2), Span(3, 5, anchor, 0, 1))
        anchor = SpanPrompt((number, 1, 2, 3, 4, 5), spans)
    payload = encode(Ask((Span(1, 2, anchor),)))
    assert len(payload) < 3001 * (1 + 6 + 1 + 3 * 5) + 20
    (span,) = decode(payload, (7, 8, 9)).spans
    assert span.anchor == anchor


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ({}, "flat list of ints is wanted, got dict"),
        ([], "ends at int 0"),
        ([2], "version 2; this engine reads version 1"),
        ([1, 32], "flags is 32"),
        ([1, 0, 0, 0, 0, -1], "number of anchors is -1"),
        ([1, 0, 0, 0, 0, 10**9], "number of anchors is 1000000000"),
        ([1, 0, 0, 0, 0, 0, 1, 2, 4, -1, -1, -1], "repair -1"),
        ([1, 0, 0, 0, 0, 0, 1, 2, 6, 0, -1, -1], "leave one token behind it"),
        ([1, 0, 0, 0, 0, 0, 1, 2, True, 0, -1, -1], "holds True"),
        ([1, 0, 0, 0, 0, 1, 1, 2**63, 0, 1, 2, 4, 0, -1, 0], r"anchor 0 holds 9223372036854775808; .* below 2\*\*62"),
        ([1, 0, 0, 0, 0, 0, 1, 2, 4, 2**62, -1, -1], r"span 0 of the prompt holds 4611686018427387904"),
    ],
)
def test_errors_say_what_is_wrong(payload: Any, message: str) -> None:
    try:
        with pytest.raises(QueryError, match=message):
            decode(payload, range(6))
    except AssertionError as failed:
        raise AssertionError(f"{payload}: {failed}") from failed
