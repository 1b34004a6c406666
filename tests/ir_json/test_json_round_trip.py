"""What is written as JSON is read back as the same query, and conforms to the published schema."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawer, queries, shelf

import spanflow.ir.json
from spanflow import chat, commute, fragment, generate, retrieve, seq, system, user
from spanflow.errors import QueryError
from spanflow.ir.json import from_json, json_schema, to_json, to_json_text
from spanflow.ir.nodes import Commute, Fragment, Generate, Node, Sampling, Seq, Text
from spanflow.ir.text import from_text, to_text

RETRIEVERS = {"shelf": shelf, "the drawer": drawer}
SCHEMA_FILE = Path(spanflow.ir.json.__file__).parent / "schema.json"


def _schema_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("schema_check", Path(__file__).parent / "schema_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHECK = _schema_check()


@given(queries(), st.sampled_from([None, 0, 2]))
def test_what_is_written_reads_back(query: Node, indent: int | None) -> None:
    data = to_json(query, retrievers=RETRIEVERS)
    assert from_json(data, retrievers=RETRIEVERS) == query
    text = to_json_text(query, retrievers=RETRIEVERS, indent=indent)
    assert from_json(text, retrievers=RETRIEVERS) == query
    assert from_json(text.encode(), retrievers=RETRIEVERS) == query
    assert from_json("\ufeff" + text, retrievers=RETRIEVERS) == query
    assert json.loads(text) == data
    assert text == json.dumps(
        data, ensure_ascii=False, indent=indent, separators=None if indent is not None else (",", ":")
    )


@given(queries())
def test_what_is_written_conforms_to_the_schema(query: Node) -> None:
    schema = json_schema()
    assert list(CHECK.problems(to_json(query, retrievers=RETRIEVERS), schema, schema)) == []


@given(queries())
def test_text_and_json_say_the_same(query: Node) -> None:
    text = to_text(query, retrievers=RETRIEVERS)
    data = to_json(query, retrievers=RETRIEVERS)
    assert to_json(from_text(text, retrievers=RETRIEVERS), retrievers=RETRIEVERS) == data
    assert to_text(from_json(data, retrievers=RETRIEVERS), retrievers=RETRIEVERS) == text


def test_the_form() -> None:
    query = generate(
        seq(
            system("Pick one."),
            commute(
                generate(user("A name?"), n=3, temperature=0.5, stop="\n"),
                retrieve(shelf, "names", 2, rung="repair(8)", anchor="none"),
                rung="moved",
                associative=True,
                separator="",
            ),
            chat([user("Which?", fragment("One.", id="d", metadata={"b": (1, None), "a": "x"}))], seed=1),
        ),
        max_tokens=9,
        top_p=0.5,
        schema={"type": "object"},
        reduce="tree",
        arity=3,
        model="m",
    )
    candidates = {"type": "generate", "query": {"type": "user", "parts": ["A name?"]}, "temperature": 0.5, "n": 3}
    document = {"type": "fragment", "text": "One.", "id": "d", "metadata": {"a": "x", "b": [1, None]}}
    found = {"type": "retrieve", "from": "shelf", "query": "names", "k": 2, "rung": "repair(8)", "anchor": "none"}
    join = {"type": "commute", "operands": [candidates | {"stop": ["\n"]}, found]}
    last = {"type": "chat", "messages": [{"type": "user", "parts": ["Which?", document]}], "seed": 1}
    operands = [
        {"type": "system", "parts": ["Pick one."]},
        join | {"rung": "moved", "associative": True, "separator": ""},
        last,
    ]
    options = {"max_tokens": 9, "top_p": 0.5, "schema": {"type": "object"}, "reduce": "tree", "arity": 3, "model": "m"}
    expected = {"spanflow": 1, "query": {"type": "generate", "query": {"type": "seq", "operands": operands}} | options}
    assert json.loads(to_json_text(query)) == expected
    assert from_json(expected, retrievers={"shelf": shelf}) == query


def test_defaults_and_nulls_may_be_written_out() -> None:
    options = {"rung": None, "anchor": None, "associative": False, "separator": "\n\n"}
    sampling = {"max_tokens": None, "temperature": 0, "top_p": 1, "stop": [], "seed": None, "schema": None}
    inner = {"type": "commute", "operands": ["a"]} | options
    data = {"type": "generate", "query": inner, "n": 1, "model": None, "reduce": None, "arity": 2} | sampling
    assert from_json({"spanflow": 1, "query": data}) == generate(commute("a"))
    bare = {"type": "fragment", "text": "a", "id": None, "metadata": {}}
    assert from_json({"spanflow": 1, "query": bare}) == fragment("a")


@pytest.mark.parametrize("schema", ['{"a": 1}', '{"b":1,"a":[true]}', "[]", "true", "{", '"x"'])
def test_a_schema_is_an_object_where_its_text_comes_back(schema: str) -> None:
    query = Generate(Text("x"), Sampling(schema=schema))
    written = to_json(query)["query"]["schema"]
    assert isinstance(written, str) is (schema not in ('{"b":1,"a":[true]}', "true"))
    assert from_json(to_json_text(query)) == query


def test_depth_is_no_limit() -> None:
    query: Node = Text("down here")
    for level in range(5_000):
        query = Seq((query,)) if level % 2 else Commute((query, Text("beside it")))
    assert from_json(to_json(query)) == query
    assert from_json(to_json_text(query)) == query
    indented = to_json_text(query, indent=2)
    assert from_json(indented) == query
    assert max(map(len, indented.split("\n"))) < 90


def test_equal_queries_have_equal_forms() -> None:
    one, other = Fragment("x", metadata={"b": (1,), "a": 2}), Fragment("x", metadata={"a": 2, "b": [1]})
    assert one == other
    assert to_json_text(one) == to_json_text(other)


def test_the_published_schema_is_current() -> None:
    """Where it is not: write json.dumps(json_schema(), indent=2) and an end of line to the file."""
    assert SCHEMA_FILE.read_text(encoding="utf-8") == json.dumps(json_schema(), indent=2) + "\n"


def test_the_schema_refuses_what_the_reader_refuses() -> None:
    schema = json_schema()
    for node in [
        {"type": "usr", "parts": []},
        {"type": "user"},
        {"type": "user", "parts": "a"},
        {"type": "commute", "operands": []},
        {"type": "seq", "operands": [], "rung": "moved"},
        {"type": "commute", "operands": ["a"], "rung": "repair(0)"},
        {"type": "generate", "query": "a", "n": 256},
        {"type": "generate", "query": "a", "top_p": 0},
        {"type": "generate", "query": {"type": "user", "parts": [3]}},
        {"type": "chat", "messages": ["a"], "stop": [""]},
        {"type": "retrieve", "query": "a"},
        3,
    ]:
        data = {"spanflow": 1, "query": node}
        assert list(CHECK.problems(data, schema, schema)) != []
        with pytest.raises(QueryError):
            from_json(data, retrievers=RETRIEVERS)


def test_what_json_cannot_say_is_not_written() -> None:
    with pytest.raises(QueryError, match=r"^\$\.operands\[1\]: fragment: metadata\.a: nan has no JSON form"):
        to_json(seq("a", fragment("b", metadata={"a": float("nan")})))
    with pytest.raises(QueryError, match=r"^\$\.operands\[0\]: retrieve: this retriever, a function, is none of those"):
        to_json(seq(retrieve(drawer, "b")), retrievers={"shelf": shelf})
    with pytest.raises(QueryError, match="there are no operands"):
        to_json(Commute(()))
    with pytest.raises(QueryError, match="at most 16,777,216 are read at once"):
        to_json_text(Text("x" * 2**24))
