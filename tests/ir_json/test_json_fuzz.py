"""Whatever is read, it is a query that can be written, or a QueryError that names a path; and it is quick."""

from __future__ import annotations

import json
import math
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawer, queries, shelf

from spanflow.errors import QueryError
from spanflow.ir.json import from_json, to_json, to_json_text
from spanflow.ir.json.decode import decode, encode
from spanflow.ir.json.model import MODELS
from spanflow.ir.nodes import Node
from spanflow.ir.verify import verify

RETRIEVERS = {"shelf": shelf, "drawer": drawer}
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)
KEYS = ["user", "system", "plus", "cross", "seq", "par", "g", "repeat", "map", "monad", "zip", "augment", "print"]
KEYS += [
    "type",
    "operands",
    "parts",
    "query",
    "n",
    "input",
    "model",
    "metadata",
    "inputs",
    "first",
    "second",
    "spanflow",
]
KEYS += ["temperature", "max_tokens", "body", "doc", "embedding_model", "Text", "generate", "text", "from", "stop"]
WORDS = [*KEYS, "commute", "chat", "fragment", "retrieve", "shelf", "moved", ""]
LEAVES = SCALARS | st.sampled_from(WORDS) | st.integers(-2, 300)
LIKELY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=12,
)


def read(data: Any) -> None:
    """Read something; what is accepted is whole."""
    start = time.process_time()
    try:
        query = from_json(data, retrievers=RETRIEVERS)
    except QueryError as error:
        said = str(error)
        assert said.startswith("$"), said
        assert "variant" not in said
        assert len(said) < 2000
        return
    finally:
        assert time.process_time() - start < 5
    verify(query)
    assert from_json(to_json(query, retrievers=RETRIEVERS), retrievers=RETRIEVERS) == query


@given(VALUES)
def test_values_are_read_and_written_as_by_the_standard_library(value: Any) -> None:
    assert decode(json.dumps(value)) == value
    assert decode(json.dumps(value, ensure_ascii=False, indent=3)) == value
    assert encode(value) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert decode(encode(value, 2)) == value


@given(st.text(st.sampled_from('{}[],:"\\u0123456789abcdefe-+. \ntrualsn')), st.data())
def test_the_reader_accepts_what_the_standard_library_accepts(source: str, data: st.DataObject) -> None:
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, 20))
        valid = json.dumps(data.draw(VALUES))
        source = valid[:start] + source[:2] + valid[start + data.draw(st.integers(0, 3)) :]
    try:
        pairs = json.loads(source, object_pairs_hook=list, parse_constant=lambda _: math.nan)
    except ValueError:
        with pytest.raises(QueryError, match="not JSON"):
            decode(source)
        return
    try:
        value = decode(source)
    except QueryError as error:
        said = str(error)
        assert "a second time" in said or "larger than any" in said or "nan" in repr(pairs)
        return
    assert value == json.loads(source)


@given(st.text() | st.binary())
def test_any_text_and_any_bytes(source: str | bytes) -> None:
    read(source)


@given(LIKELY)
def test_any_value(value: Any) -> None:
    read(value)
    read({"spanflow": 1, "query": value})


@given(st.sampled_from(KEYS), LIKELY)
def test_any_value_under_a_key(key: str, value: Any) -> None:
    read({key: value})
    read({"g": {"model": "m", "input": {key: value}}})
    read({"spanflow": 1, "query": {"type": key, "operands": value}})


@given(queries(), st.data())
def test_a_query_with_a_mistake(query: Node, data: st.DataObject) -> None:
    source = to_json_text(query, retrievers=RETRIEVERS)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(source)))
        end = min(len(source), start + data.draw(st.integers(0, 4)))
        pieces = [
            *'{}[],:"\\',
            "null",
            "1e9",
            "1e308",
            "9" * 25,
            "9" * 4000,
            "-1",
            "true",
            '"a"',
            "",
            '"type":',
            "\ud800",
            "\x00",
            source[start : start + 15],
        ]
        source = source[:start] + data.draw(st.sampled_from(pieces)) + source[end:]
    read(source)


OPENINGS = ["[", "{", '{"a":', '{"plus":[', '{"monad":', '"', "\\", "1", '"\\u0041', "-", '{"g":{"model":"m","input":[']


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("prefix", ["", '{"spanflow":1,"query":{"type":"fragment","text":"a","metadata":'])
def test_many_times_the_same(prefix: str, opening: str) -> None:
    read(prefix + opening * 20_000)


def test_deep_queries_of_spnl() -> None:
    for opening, closing in (('{"seq":[', "]}"), ('{"monad":', "}"), ('{"g":{"model":"m","input":[', "]}}")):
        read(opening * 5_000 + '{"user":"a"}' + closing * 5_000)


@pytest.mark.parametrize(
    "number",
    [10**4000 - 1, 10**4100, 10**5000, -(10**5000), 2**63, 1e308, -0.0, math.inf, math.nan],
    ids=range(9),
)
def test_huge_numbers_in_all_values(number: float) -> None:
    for name, model in MODELS.items():
        valid = {
            "type": name,
            "text": "a",
            "parts": ["a"],
            "operands": ["a"],
            "query": "a",
            "messages": ["a"],
            "from": "shelf",
        }
        known = {field.alias or key for key, field in model.model_fields.items()}
        for key in known - {"type"}:
            for value in (number, [number], {"a": number}):
                read({"spanflow": 1, "query": {k: v for k, v in valid.items() if k in known} | {key: value}})
    for key in KEYS:
        read({key: number})
        read({"g": {"model": "m", "input": {"user": "a"}, key: number}})
        read({"repeat": {"n": number, "g": {"model": "m", "input": {"user": "a"}, key: number}}})


def test_values_that_json_text_cannot_hold() -> None:
    around: dict[str, Any] = {"type": "seq"}
    around["operands"] = [around]
    for value in (b"a", {"a"}, ("a",), object(), read, around, {1: 2}, {None: None}, {"type": b"seq"}, [[]], range(3)):
        read({"spanflow": 1, "query": value})
        read({"spanflow": 1, "query": {"type": "fragment", "text": "a", "metadata": value}})
        read({"spanflow": 1, "query": {"type": "generate", "query": "a", "schema": value}})
        read({"spanflow": 1, "query": {"type": "seq", "operands": value}})
        read({"plus": [value]})


@pytest.mark.parametrize("depth", [99, 101, 20_000])
def test_deep_values(depth: int) -> None:
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        value = f'{{"a":{opening * depth}1{closing * depth}}}'
        read(f'{{"spanflow":1,"query":{{"type":"fragment","text":"a","metadata":{value}}}}}')
        read(f'{{"spanflow":1,"query":{{"type":"generate","query":"a","schema":{value}}}}}')
