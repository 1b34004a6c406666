"""Queries of spnl mean here what they mean there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from strategies import shelf

from spanflow import assistant, commute, generate, retrieve, seq, system, user
from spanflow.errors import QueryError
from spanflow.ir.json import SpnlDocument, from_json, from_spnl, to_spnl
from spanflow.ir.nodes import Node, Seq

A, B, C = {"user": "a"}, {"user": "b"}, {"user": "c"}
ASK = {"model": "m", "input": A}
#: Where a query of spnl does not say, the temperature is 0.6.
ASKED = generate(user("a"), model="m", temperature=0.6)


def g(value: Any, **options: Any) -> dict[str, Any]:
    return {"g": {"model": "m", "input": value, **options}}


MEANINGS: list[tuple[dict[str, Any], Node]] = [
    ({"user": "hello"}, user("hello")),
    ({"system": ""}, system("")),
    ({"assistant": "no"}, assistant("no")),
    ({"plus": [{"user": "hello"}, {"system": "world"}]}, commute(user("hello"), system("world"))),
    ({"cross": [B, A]}, seq(user("b"), user("a"))),
    ({"seq": [B, A]}, seq(user("b"), user("a"))),
    ({"par": [B, A]}, seq(user("b"), user("a"))),
    ({"plus": [{"seq": [A, B]}, C]}, commute(seq(user("a"), user("b")), user("c"))),
    ({"plus": [A]}, commute(user("a"))),
    ({"g": ASK}, ASKED),
    (g(A, max_tokens=0), ASKED),
    (g(A, max_tokens=None), ASKED),
    (g(A, max_tokens=7, temperature=0.25), generate(user("a"), model="m", max_tokens=7, temperature=0.25)),
    (g(A, temperature=None), generate(user("a"), model="m")),
    (g(A, temperature=0), generate(user("a"), model="m")),
    (g([A]), ASKED),
    (g([A, B]), generate(seq(user("a"), user("b")), model="m", temperature=0.6)),
    ({"repeat": {"n": 3, "g": ASK}}, generate(user("a"), model="m", temperature=0.6, n=3)),
    ({"repeat": {"n": 3, "generate": ASK}}, generate(user("a"), model="m", temperature=0.6, n=3)),
    ({"repeat": {"n": 3, "query": {"g": ASK}}}, generate(user("a"), model="m", temperature=0.6, n=3)),
    ({"repeat": {"n": 1, "g": ASK}}, ASKED),
    (
        {"plus": [{"repeat": {"n": 2, "g": ASK}}, B]},
        commute(generate(user("a"), model="m", temperature=0.6, n=2), user("b")),
    ),
    (
        {"cross": [B, {"repeat": {"n": 2, "g": ASK}}]},
        seq(user("b"), commute(generate(user("a"), model="m", temperature=0.6, n=2))),
    ),
    ({"cross": [B, {"repeat": {"n": 1, "g": ASK}}]}, seq(user("b"), ASKED)),
    (
        g({"repeat": {"n": 2, "g": ASK}}),
        generate(commute(generate(user("a"), model="m", temperature=0.6, n=2)), model="m", temperature=0.6),
    ),
    (
        {"map": {"metadata": {"model": "m", "max_tokens": 4}, "inputs": ["x", "y"]}},
        commute([generate(user(text), model="m", temperature=0.6, max_tokens=4) for text in ("x", "y")]),
    ),
    ({"monad": {"plus": [g(A, max_tokens=1)]}}, Seq(())),
    ({"seq": [{"monad": A}, B]}, seq(Seq(()), user("b"))),
    ({"zip": {"first": A, "second": B}}, seq(user("a"), user("b"))),
    ({"zip": {"first": A, "second": {"g": ASK}}}, seq(user("a"), ASKED)),
    ({"zip": {"first": A, "second": {"par": [B, C]}}}, seq(user("a"), user("b"), user("a"), user("c"))),
    ({"zip": {"first": A, "second": {"cross": [B, C]}}}, seq(user("a"), user("b"), user("a"), user("c"))),
    ({"zip": {"first": A, "second": {"plus": [B, C]}}}, commute(user("a"), user("b"), user("a"), user("c"))),
    ({"zip": {"first": A, "second": {"plus": [B]}}}, seq(user("a"), user("b"))),
]


@pytest.mark.parametrize(("data", "query"), MEANINGS, ids=[json.dumps(data)[:50] for data, _ in MEANINGS])
def test_meaning(data: dict[str, Any], query: Node) -> None:
    assert from_spnl(data) == query
    assert from_spnl(json.dumps(data)) == query
    assert from_json(data) == query


@pytest.mark.parametrize(
    "data",
    [
        {"user": "hello"},
        {"plus": [{"user": "hello"}, {"system": "world"}]},
        {"g": {"model": "m", "input": {"user": "hello"}}},
        {"cross": [A, {"plus": [{"repeat": {"n": 4, "g": ASK}}]}, B]},
        {"plus": [{"g": {"model": "m", "input": {"cross": [A, B]}, "max_tokens": 5, "temperature": 0.3}}]},
    ],
)
def test_what_is_read_is_written_the_same(data: dict[str, Any]) -> None:
    assert to_spnl(from_spnl(data)) == data


def test_the_documented_judge() -> None:
    source = """
    {"g": {"model": "ollama/granite3.2:2b", "input": {"cross": [
        {"system": "You judge emails by scoring them"},
        {"plus": [{"repeat": {"n": 4, "query": {"g": {
            "model": "ollama/granite3.2:2b", "input": {"user": "Generate a fun email"},
            "max_tokens": 1000, "temperature": 0.3}}}}]},
        {"user": "I am looking for a job at NASA"}]}}}
    """
    model = "ollama/granite3.2:2b"
    email = generate(user("Generate a fun email"), model=model, max_tokens=1000, temperature=0.3, n=4)
    judge = seq(system("You judge emails by scoring them"), commute(email), user("I am looking for a job at NASA"))
    assert from_json(source) == generate(judge, model=model, temperature=0.6)


def test_an_augment_is_answered_by_a_retriever_of_its_document() -> None:
    document = ["notes.txt", {"Text": "All about hens."}]
    data = {"cross": [{"augment": {"embedding_model": "e", "body": {"user": "why?"}, "doc": document}}, A]}
    expected = seq(retrieve(shelf, "why?"), user("a"))
    assert from_spnl(data, retrievers={"notes.txt": shelf}) == expected
    assert from_json(data, retrievers={"notes.txt": shelf}) == expected
    asked: list[SpnlDocument] = []

    def index(document: SpnlDocument) -> Any:
        asked.append(document)
        return shelf

    assert from_spnl(data, retrievers=index) == expected
    document[1] = {"Binary": [0, 255]}
    assert from_spnl(data, retrievers=index) == expected
    assert asked == [("notes.txt", "All about hens.", "e"), ("notes.txt", b"\x00\xff", "e")]


def augment(body: Any, doc: Any) -> dict[str, Any]:
    return {"augment": {"embedding_model": "e", "body": body, "doc": doc}}


DOC = ["a.txt", {"Text": "x"}]
PROBLEMS: list[tuple[Any, str]] = [
    ({"usr": "a"}, "$: unknown key 'usr'; did you mean 'user'?"),
    ({"Repeat": {}}, "$: unknown key 'Repeat'; did you mean 'repeat'?"),
    ({"user": "a", "system": "b"}, "$: expected a query, an object with one key, got 'user', 'system'; join queries"),
    (
        g({"plus": [A, B, {"x": 1}]}),
        "$.g.input.plus[2]: unknown key 'x'; known keys are assistant, augment, cross, g, map",
    ),
    (g({"plus": [A, B, {"cross": []}]}), "$.g.input.plus[2].cross: there is nothing to join: the list is empty; leave"),
    ({"plus": []}, "$.plus: there is nothing to join"),
    ({"seq": []}, "$.seq: there is nothing to join"),
    (g([]), "$.g.input: there is nothing to join"),
    ({"plus": A}, "$.plus: expected a list of queries, got an object"),
    ({"plus": [A, "b"]}, "$.plus[1]: expected a query, an object with one key, got the text 'b'"),
    ({"plus": [A, {}]}, "$.plus[1]: expected a query, an object with one key, got none"),
    ({"user": 3}, "$.user: expected text, got the number 3"),
    ({"user": "a\ud800"}, "$.user: the character at position 1 is half of a surrogate pair"),
    ({"print": "a"}, "$: 'print' cannot be said here: it writes to the console of spnl and is no part of the prompt"),
    ({"seq": [{"ask": "a"}]}, "$.seq[0]: 'ask' cannot be said here: it asks whoever sits at the console"),
    ({"seq": [{"file": "a"}]}, "$.seq[0]: 'file' cannot be said here: it reads a file where spnl runs"),
    ({"g": 3}, "$.g: expected an object, got the number 3"),
    ({"g": {"input": A}}, "$.g: 'model' is missing"),
    ({"g": {"model": "m"}}, "$.g: 'input' is missing"),
    ({"g": {"model": "", "input": A}}, "$.g.model: expected text that is not empty"),
    (g(A, max_tokns=3), "$.g: unknown key 'max_tokns'; did you mean 'max_tokens'?"),
    (g(A, max_tokens=-1), "$.g.max_tokens: expected at least 0, got the number -1"),
    (g(A, max_tokens=2**31), "$.g.max_tokens: expected at most 2147483647, got the number 2147483648"),
    (g(A, max_tokens="{n}"), "$.g.max_tokens: expected a whole number, got the text '{n}'"),
    (g(A, temperature="hot"), "$.g.temperature: expected a number, got the text 'hot'"),
    (g({"user": ""}), "$.g: this generate has nothing to read"),
    ({"plus": [A, g({"monad": A})]}, "$.plus[1].g: this generate has nothing to read"),
    ({"repeat": {"n": 300, "g": ASK}}, "$.repeat.n: expected at most 255, got the number 300"),
    ({"repeat": {"n": 0, "g": ASK}}, "$.repeat.n: expected at least 1, got the number 0"),
    ({"repeat": {"g": ASK}}, "$.repeat: 'n' is missing"),
    ({"repeat": {"n": 2}}, "$.repeat: expected 'n' and one of 'g', 'generate' and 'query', got neither"),
    (
        {"repeat": {"n": 2, "g": ASK, "query": A}},
        "$.repeat: expected 'n' and one of 'g', 'generate' and 'query', got 'g' and",
    ),
    ({"repeat": {"n": 2, "query": A}}, "$.repeat.query: expected {'g': ...}, since only a generation can be repeated"),
    (
        {"repeat": {"n": 2, "query": {"g": {"model": "m", "input": {"plus": []}}}}},
        "$.repeat.query.g.input.plus: there is",
    ),
    ({"map": {"metadata": {"model": "m"}, "inputs": []}}, "$.map.inputs: expected at least 1, got a list of 0"),
    ({"map": {"metadata": {"model": "m"}, "inputs": ["a", 3]}}, "$.map.inputs[1]: expected text, got the number 3"),
    ({"map": {"metadata": {}, "inputs": ["a"]}}, "$.map.metadata: 'model' is missing"),
    ({"map": {"metadata": {"model": "m"}, "inputs": ["a", ""]}}, "$.map: this generate has nothing to read"),
    ({"monad": {"plus": [{"x": 1}]}}, "$.monad.plus[0]: unknown key 'x'"),
    ({"zip": {"first": A}}, "$.zip: 'second' is missing"),
    (
        {"zip": {"first": {"plus": [A]}, "second": B}},
        "$.zip.first: cannot be said here: only a message can stand before",
    ),
    ({"zip": {"first": {"g": ASK}, "second": B}}, "$.zip.first: cannot be said here: only a message can stand before"),
    ({"zip": {"first": A, "second": {"seq": [B, {"seq": [C]}]}}}, "$.zip.second.seq[1]: cannot be said here: how many"),
    ({"zip": {"first": A, "second": {"repeat": {"n": 2, "g": ASK}}}}, "$.zip.second: cannot be said here: how many"),
    (augment({"plus": [A]}, DOC), "$.augment.body: cannot be said here: a retrieve asks one question, which is known"),
    (augment(A, ["a.txt"]), "$.augment.doc: expected at least 2, got a list of 1"),
    (augment(A, [3, {"Text": "x"}]), "$.augment.doc[0]: expected text, got the number 3"),
    (augment(A, ["a.txt", "x"]), "$.augment.doc[1]: expected {'Text': ...} or {'Binary': [...]}, got the text 'x'"),
    (augment(A, ["a.txt", {"Binary": [256]}]), "$.augment.doc[1].Binary: expected a list of numbers from 0 to 255"),
    (augment(A, ["a.txt", {"Binary": ["x"]}]), "$.augment.doc[1].Binary: expected a list of numbers from 0 to 255"),
    (
        augment(A, DOC),
        "$.augment.doc[0]: there is no retriever 'a.txt': none were given; pass retrievers={'a.txt': ...}",
    ),
]


@pytest.mark.parametrize(("data", "problem"), PROBLEMS, ids=[problem[:50] for _, problem in PROBLEMS])
def test_what_is_wrong_is_refused_where_it_stands(data: Any, problem: str) -> None:
    with pytest.raises(QueryError) as caught:
        from_spnl(data)
    assert str(caught.value).startswith(problem)
    assert len(str(caught.value)) < 400


def test_a_function_that_makes_no_retriever_is_refused() -> None:
    with pytest.raises(
        QueryError, match=r"^\$\.augment\.doc\[0\]: the function given as retrievers= made no retriever"
    ):
        from_spnl(augment(A, DOC), retrievers=lambda document: None)


def test_depth_is_no_limit() -> None:
    data: dict[str, Any] = {"user": "down here"}
    for level in range(5_000):
        data = {"plus": [data]} if level % 2 else g([data, A], max_tokens=5)
    assert to_spnl(from_spnl(data))


def test_a_value_that_holds_itself_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanflow.ir.json.spnl_read.MAX_DEPTH", 1_000)
    around: dict[str, Any] = {"plus": [A]}
    around["plus"].append(around)
    with pytest.raises(
        QueryError, match=r"^\$\.plus\[1\]\.plus.*: the query has .* 1,000 levels; does a list contain it"
    ):
        from_spnl(around)
