"""What is no query is refused with the path in the JSON, and what was expected there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from strategies import shelf

from spanflow.errors import QueryError
from spanflow.ir.json import from_json

RETRIEVERS = {"shelf": shelf}

#: A query, and what is said about it.
QUERIES: list[tuple[Any, str]] = [
    (3, "$.query: expected a node, which is text or an object with a type, got the number 3"),
    (None, "$.query: expected a node, which is text or an object with a type, got null"),
    ({}, "$.query: 'type' is missing; types are system, user, assistant, fragment, seq, commute, generate, retrieve"),
    ({"type": "comute"}, "$.query.type: the text 'comute' is no type of a node; did you mean 'commute'?"),
    ({"type": 3}, "$.query.type: the number 3 is no type of a node; types are system"),
    ({"type": "user"}, "$.query: 'parts' is missing"),
    ({"type": "user", "prts": []}, "$.query: unknown key 'prts'; did you mean 'parts'?"),
    ({"type": "user", "parts": [], "x": 1}, "$.query: unknown key 'x'; known keys are type, parts"),
    ({"type": "user", "parts": "a"}, "$.query.parts: expected a list, got the text 'a'"),
    (
        {"type": "user", "parts": ["a", {"type": "seq", "operands": [1]}]},
        "$.query.parts[1].operands[0]: expected a node",
    ),
    ({"type": "user", "parts": ["a", {"type": "user", "parts": []}]}, "$.query.parts[1]: a message stands inside a"),
    (
        {"type": "seq", "operands": ["\ud800"]},
        "$.query.operands[0]: the character at position 0 is half of a surrogate",
    ),
    ({"type": "fragment", "text": 3}, "$.query.text: expected text, got the number 3"),
    ({"type": "fragment", "text": "a", "id": 3}, "$.query.id: expected text, got the number 3"),
    ({"type": "fragment", "text": "a", "metadata": []}, "$.query.metadata: expected an object, got a list of 0"),
    ({"type": "commute", "operands": []}, "$.query.operands: expected at least 1, got a list of 0"),
    ({"type": "commute", "operands": ["a"], "rung": "x"}, "$.query.rung: expected 'exact', 'moved' or 'repair(N)'"),
    (
        {"type": "commute", "operands": ["a"], "anchor": "heads"},
        "$.query.anchor: expected 'header', 'head' or 'none', got the text 'heads'; did you mean 'head'?",
    ),
    (
        {"type": "commute", "operands": ["a"], "associative": 1},
        "$.query.associative: expected true or false, got the number 1",
    ),
    ({"type": "generate", "query": "a", "n": 300}, "$.query.n: expected at most 255, got the number 300"),
    ({"type": "generate", "query": "a", "n": 0}, "$.query.n: expected at least 1, got the number 0"),
    ({"type": "generate", "query": "a", "n": True}, "$.query.n: expected a whole number, got true"),
    ({"type": "generate", "query": "a", "n": 1.5}, "$.query.n: expected a whole number, got the number 1.5"),
    ({"type": "generate", "query": "a", "n": "2"}, "$.query.n: expected a whole number, got the text '2'"),
    ({"type": "generate", "query": "a", "seed": 10**400}, "$.query.seed: expected at most 9223372036854775807, got a"),
    ({"type": "generate", "query": "a", "temperature": "hot"}, "$.query.temperature: expected a number, got the text"),
    ({"type": "generate", "query": "a", "temperature": -1}, "$.query.temperature: expected at least 0, got"),
    ({"type": "generate", "query": "a", "top_p": 0}, "$.query.top_p: expected more than 0, got the number 0"),
    ({"type": "generate", "query": "a", "stop": ["a", ""]}, "$.query.stop[1]: expected text that is not empty"),
    ({"type": "generate", "query": "a", "stop": ["a"] * 17}, "$.query.stop: expected at most 16, got a list of 17"),
    (
        {"type": "generate", "query": "a", "schema": 3},
        "$.query.schema: expected a JSON Schema as an object, or its text",
    ),
    ({"type": "generate", "query": "a", "reduce": "forest"}, "$.query.reduce: expected 'tree', got the text 'forest'"),
    ({"type": "generate", "query": {"type": "user", "parts": []}}, "$.query: this generate has nothing to read"),
    (
        {"type": "seq", "operands": [{"type": "generate", "query": "a", "n": 2}]},
        "$.query.operands[0]: generate: n=2 asks",
    ),
    ({"type": "chat", "messages": []}, "$.query.messages: expected at least 1, got a list of 0"),
    ({"type": "retrieve", "query": "a"}, "$.query: 'from' is missing"),
    ({"type": "retrieve", "from": "shlf", "query": "a"}, "$.query.from: there is no retriever 'shlf' (known: 'shelf')"),
    ({"type": "retrieve", "from": "shelf", "query": "a", "k": 0}, "$.query.k: expected at least 1, got the number 0"),
]

SOURCES = [
    ("", "$: not JSON: expected a value, got the end (line 1, column 1)"),
    ("{", "$: not JSON: expected a key in double quotes, got the end"),
    ("{'user': 'a'}", "$: not JSON: expected a key in double quotes, got \"'user': 'a'}\""),
    ('{"user" "a"}', "$.user: not JSON: expected ':', got '\"a\"}'"),
    ('{"user": "a",}', "$: not JSON: expected a key in double quotes, got '}'"),
    ('{"user": "a"} x', "$: not JSON: expected the end, got 'x'"),
    ('{"user": "a\nb"}', "$.user: not JSON: a string that does not end, or has an escape or a control character"),
    ('{"user": "\\x41"}', "$.user: not JSON: a string that does not end"),
    ('{"g": {"input": {"plus": [{"user": "a"},\n {"user": "b"}, {"user": c}]}}}', "$.g.input.plus[2].user: not JSON"),
    ('{"g": {"input": {"plus": [1, 2,]}}}', "$.g.input.plus[2]: not JSON: expected a value, got ']}}}'"),
    ('{"user": "a", "user": "b"}', "$: not JSON: the key 'user' comes a second time"),
    ('{"plus": [NaN]}', "$.plus[0]: not JSON: expected a value, got 'NaN]}'"),
    ('{"plus": [1e999]}', "$.plus[0]: not JSON: a number larger than any that can be used"),
    ('{"plus": [' + "1" * 5000 + "]}", "$.plus[0]: not JSON: a number of 5,000 digits; at most 4,000 are read"),
    ('{"plus": [01]}', "$.plus: not JSON: expected ',' or ']', got '1]}'"),
    ('{"odd key": [}', '$["odd key"][0]: not JSON: expected a value'),
    ("[" * 200_001, "nested more than 200,000 levels deep"),
    (" " * 2**24 + "{}", "$: the JSON has 16,777,218 characters, and at most 16,777,216 are read at once"),
    ("[]", "$: expected an object, got a list of 0"),
    ("null", "$: expected an object, got null"),
    ('{"spanflow": 1}', "$: 'query' is missing"),
    ('{"spanflow": 1, "query": "a", "qery": 1}', "$: unknown key 'qery'; did you mean 'query'?"),
    ('{"spanflow": 2, "query": "a"}', "$.spanflow: this version reads version 1 of the JSON form, got the number 2"),
    ('{"spanflow": true, "query": "a"}', "$.spanflow: this version reads version 1 of the JSON form, got true"),
    ('{"spanflow": "1", "query": "a"}', "$.spanflow: this version reads version 1 of the JSON form, got the text '1'"),
    (
        '{"query": "a"}',
        '$: expected {"spanflow": 1, "query": ...}, or a query of spnl, which is an object with one key',
    ),
    ("{}", '$: expected {"spanflow": 1, "query": ...}, or a query of spnl'),
]


@pytest.mark.parametrize(("query", "problem"), QUERIES, ids=[problem[:60] for _, problem in QUERIES])
def test_a_wrong_node_is_refused_where_it_stands(query: Any, problem: str) -> None:
    data = {"spanflow": 1, "query": query}
    for source in (data, json.dumps(data)):
        with pytest.raises(QueryError) as caught:
            from_json(source, retrievers=RETRIEVERS)
        assert str(caught.value).startswith(problem)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(("source", "problem"), SOURCES, ids=[problem[:60] for _, problem in SOURCES])
def test_wrong_json_is_refused_where_it_stands(source: str, problem: str) -> None:
    with pytest.raises(QueryError) as caught:
        from_json(source, retrievers=RETRIEVERS)
    assert problem in str(caught.value)
    assert len(str(caught.value)) < 500


def test_the_line_and_the_column_are_named() -> None:
    with pytest.raises(QueryError, match=r"\(line 3, column 4\)$"):
        from_json('{"plus": [\n  {"user": "a"}\n   {"user": "b"}]}')


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"\xff", r"^\$: not JSON: byte 0 is no UTF-8; decode it first"),
        (3, r"^\$: expected an object, got the number 3"),
        (
            {"spanflow": 1, "query": {"type": "fragment", "text": "a", "metadata": {1: 2}}},
            r"^\$\.query\.metadata: keys must be text, got the number 1",
        ),
        (
            {"spanflow": 1, "query": {"type": "user", "parts": ("a",)}},
            r"parts: expected a list, got a tuple of 1, which",
        ),
        (
            {"spanflow": 1, "query": {3: 4, "type": "user", "parts": []}},
            r"^\$\.query: keys must be text, got the number 3",
        ),
    ],
)
def test_values_that_come_from_no_json_are_refused(data: Any, problem: str) -> None:
    with pytest.raises(QueryError, match=problem):
        from_json(data)


def test_a_value_that_holds_itself_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanflow.ir.json.read.MAX_DEPTH", 1_000)
    around: dict[str, Any] = {"type": "seq", "operands": []}
    around["operands"] += [around, around]
    with pytest.raises(QueryError, match="more than 1,000,000 nodes or 1,000 levels; does a list contain itself"):
        from_json({"spanflow": 1, "query": around})
    metadata: dict[str, Any] = {}
    metadata["m"] = metadata
    with pytest.raises(QueryError, match=r"^\$\.query\.metadata: nested more than 100 levels deep"):
        from_json({"spanflow": 1, "query": {"type": "fragment", "text": "a", "metadata": metadata}})


def test_without_retrievers_none_is_found() -> None:
    with pytest.raises(QueryError, match=r"^\$\.query\.from: there is no retriever 'a': none were given; pass"):
        from_json({"spanflow": 1, "query": {"type": "retrieve", "from": "a", "query": "b"}})
