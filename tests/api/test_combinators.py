"""The combinators build the nodes that they say, and refuse what they cannot read where it stands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import fragments, shelf, texts

from spanflow import (
    QueryError,
    assistant,
    chat,
    commute,
    fragment,
    generate,
    repair,
    retrieve,
    seq,
    system,
    to_text,
    user,
)
from spanflow.ir.fidelity import EXACT, MOVED
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Sampling, Seq, Text
from spanflow.ir.verify import verify

A, B, C = Text("a"), Text("b"), Text("c")


class Mood(StrEnum):
    GOOD = "good"


class Loud(str):
    __slots__ = ()

    def __str__(self) -> str:
        return "LOUD"


@pytest.mark.parametrize(
    ("built", "expected"),
    [
        (system("a"), Message("system", (A,))),
        (user("a", fragment("b"), commute("c")), Message("user", (A, Fragment("b"), Commute((C,))))),
        (assistant("a"), Message("assistant", (A,))),
        (
            user("a", generate("b"), commute(generate("c", n=2))),
            Message("user", (A, Generate(B), Commute((Generate(C, n=2),)))),
        ),
        (user(""), Message("user", (Text(""),))),
        (user(["a", "b"], "c"), Message("user", (Seq((A, B)), C))),
        (user(text for text in "ab"), Message("user", (Seq((A, B)),))),
        (user(Mood.GOOD, Loud("b")), Message("user", (Text("good"), B))),
        (user(np.array(["a", "b"])), Message("user", (Seq((A, B)),))),
        (fragment("a"), Fragment("a", None, {})),
        (fragment("a", id="1", metadata={"page": 3}), Fragment("a", "1", {"page": 3})),
        (seq(), Seq(())),
        (seq("a", ["b", ("c",)]), Seq((A, Seq((B, Seq((C,))))))),
        (commute("ab"), Commute((Text("ab"),))),
        (commute("a", "b"), Commute((A, B))),
        (commute(["a", "b"]), Commute((A, B))),
        (commute(text for text in "ab"), Commute((A, B))),
        (commute([["a", "b"], "c"]), Commute((Seq((A, B)), C))),
        (commute(["a", "b"], "c"), Commute((Seq((A, B)), C))),
        (commute(seq("a", "b")), Commute((Seq((A, B)),))),
        (commute("a", rung="exact", anchor="none"), Commute((A,), EXACT, "none")),
        (commute("a", rung="repair(8)"), Commute((A,), repair(8))),
        (commute("a", rung=MOVED, associative=True, separator=""), Commute((A,), MOVED, None, True, "")),
        (generate("a"), Generate(A)),
        (generate(["a", "b"]), Generate(Seq((A, B)))),
        (generate(A, n=3, model="m", reduce="tree", arity=4), Generate(A, n=3, model="m", reduce="tree", arity=4)),
        (
            generate(A, max_tokens=5, temperature=1, top_p=0.5, stop=["x", "y"], seed=0),
            Generate(A, Sampling(5, 1.0, 0.5, ("x", "y"), 0)),
        ),
        (generate(A, stop="x"), Generate(A, Sampling(stop=("x",)))),
        (
            generate(A, max_tokens=np.int64(5), temperature=np.float32(0.5), top_p=Fraction(1, 2)),
            Generate(A, Sampling(5, 0.5, 0.5)),
        ),
        (retrieve(shelf, "q"), Retrieve(shelf, "q")),
        (retrieve(shelf, "q", 3, rung="moved", anchor="head"), Retrieve(shelf, "q", 3, MOVED, "head")),
        (chat([user("a")]), Chat((user("a"),))),
        (
            chat([("system", "a"), {"role": "user", "content": "b"}, assistant("c")], max_tokens=3),
            Chat((system("a"), user("b"), assistant("c")), Sampling(3)),
        ),
        (chat([("user", ["a", fragment("b")])]), Chat((Message("user", (Seq((A, Fragment("b"))),)),))),
        (
            chat([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]),
            Chat((Message("user", (Seq((A, B)),)),)),
        ),
        (chat([retrieve(shelf, "q"), user("a")]), Chat((Retrieve(shelf, "q"), user("a")))),
    ],
)
def test_what_is_written_is_what_is_built(built: Node, expected: Node) -> None:
    assert built == expected
    assert type(built) is type(expected)


def test_text_is_plain_text_whatever_class_it_had() -> None:
    for value in (Mood.GOOD, Loud("x"), np.str_("x")):
        assert type(Text.__slots__ and user(value).parts[0].text) is str  # type: ignore[attr-defined]


def test_a_fragment_keeps_its_own_copy_of_metadata() -> None:
    metadata = {"page": 1}
    made = fragment("a", metadata=metadata)
    metadata["page"] = 2
    assert made.metadata == {"page": 1}


class Answer(pydantic.BaseModel):
    reasoning: str
    choice: int


def test_a_schema_keeps_the_order_of_its_properties() -> None:
    schema = {"type": "object", "properties": {"why": {"type": "string"}, "answer": {"type": "integer"}}}
    text = '{"type":"object","properties":{"why":{"type":"string"},"answer":{"type":"integer"}}}'
    assert generate(A, schema=schema).sampling.schema == text
    from_model = generate(A, schema=Answer).sampling.schema
    assert from_model is not None
    assert pydantic.TypeAdapter(dict).validate_json(from_model) == Answer.model_json_schema()
    assert from_model.index("reasoning") < from_model.index("choice")
    assert chat([user("a")], schema=Answer).sampling.schema == from_model


@dataclass
class Document:
    page_content: str
    metadata: dict[str, str]


async def answer() -> str:
    return "later"


def waiting() -> Any:
    coroutine = answer()
    coroutine.close()
    return coroutine


EXPECTED = r"expected text, a node \(from user\(\), fragment\(\), commute\(\), ...\), or a list of them, got "


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: user(None), rf"user\(\): argument 1: {EXPECTED}None; is a value missing"),
        (lambda: user("a", 5), rf"user\(\): argument 2: {EXPECTED}the number 5; write str\(...\)"),
        (lambda: system(True), rf"system\(\): argument 1: {EXPECTED}True; write str"),
        (lambda: assistant(2.5), rf"assistant\(\): argument 1: {EXPECTED}the number 2.5"),
        (lambda: seq("a", ["b", None]), rf"seq\(\): argument 2\[1\]: {EXPECTED}None"),
        (lambda: seq({"role": "user"}), rf"seq\(\): argument 1: {EXPECTED}a value of type dict; chat\(\) reads"),
        (lambda: seq(b"a"), rf"{EXPECTED}a value of type bytes; decode it first"),
        (lambda: commute({"a", "b"}), rf"commute\(\): argument 1: {EXPECTED}a value of type set; the order of a set"),
        (lambda: commute(None), rf"commute\(\): argument 1: {EXPECTED}None"),
        (lambda: commute(7), rf"commute\(\): argument 1: {EXPECTED}the number 7"),
        (lambda: commute(["a", 7]), rf"commute\(\): argument 1\[1\]: {EXPECTED}the number 7"),
        (lambda: user(Document("a", {})), r"got a value of type Document; fragment\(document.page_content"),
        (lambda: user(waiting()), "got a value of type coroutine; await it first"),
        (lambda: user(answer), "got a value of type function; was it meant to be called"),
        (lambda: generate(None), rf"generate\(\): query: {EXPECTED}None"),
        (lambda: user(), r"user\(\): a message needs at least one part; '' makes an empty one"),
        (lambda: user("a", user("b")), r"user\(\): argument 2 is a message, and messages do not nest"),
        (lambda: user(chat([user("a")])), r"user\(\): argument 1 is a chat, and messages do not nest"),
        (lambda: user("ab\ud800"), r"user\(\): argument 1: the character at position 2 is half of a surrogate pair"),
        (lambda: fragment("\udc00a"), r"fragment\(\): text: the character at position 0"),
        (lambda: fragment(None), r"fragment\(\): text: must be text, got None"),
        (lambda: fragment("a", id=3), r"fragment\(\): id: must be text, got 3"),
        (lambda: fragment("a", metadata=[1]), r"fragment\(\): metadata: expected a dict, got a value of type list"),
        (lambda: commute(), r"commute\(\): there are no operands; is the list of documents or candidates empty\?"),
        (lambda: commute([]), r"commute\(\): there are no operands"),
        (lambda: commute("a", rung="copied"), r"commute\(\): rung: 'copied' is no rung; say 'exact', 'moved'"),
        (
            lambda: commute("a", rung="repair(0)"),
            r"commute\(\): rung: repair\(0\): repair a whole number of tokens, from 1 to",
        ),
        (lambda: commute("a", anchor="tail"), r"commute\(\): anchor: 'tail' is no anchor; known anchors: header"),
        (lambda: commute("a", associative=1), r"commute\(\): associative: expected True or False, got the number 1"),
        (lambda: commute("a", separator=None), r"commute\(\): separator: must be text, got None"),
        (lambda: generate("a", n=0), r"generate\(\): n: must be a whole number from 1 to 255, got 0"),
        (lambda: generate("a", n=300), r"generate\(\): n: must be a whole number from 1 to 255, got 300"),
        (lambda: generate("a", n=True), r"generate\(\): n: must be a whole number from 1 to 255, got True"),
        (lambda: generate("a", n=1.0), r"generate\(\): n: must be a whole number from 1 to 255, got 1.0"),
        (lambda: generate("a", max_tokens=0), r"generate\(\): max_tokens: must be a whole number at least 1, got 0"),
        (lambda: generate("a", max_tokens="8"), r"generate\(\): max_tokens: must be a whole number .*, got str"),
        (lambda: generate("a", temperature=-1), r"generate\(\): temperature: must be a number of at least 0"),
        (lambda: generate("a", temperature=float("nan")), r"generate\(\): temperature: .* got nan"),
        (lambda: generate("a", temperature="hot"), r"generate\(\): temperature: .* got str"),
        (lambda: generate("a", top_p=0), r"generate\(\): top_p: must be a number above 0 and at most 1, got 0"),
        (lambda: generate("a", top_p=1.01), r"generate\(\): top_p: must be a number above 0 and at most 1, got 1.01"),
        (lambda: generate("a", arity=1), r"generate\(\): arity: must be a whole number at least 2, got 1"),
        (lambda: generate("a", reduce="list"), r"generate\(\): reduce: expected 'tree' or None, got 'list'"),
        (lambda: generate("a", seed=2**63), r"generate\(\): seed: must be a whole number"),
        (lambda: generate("a", seed=-1), r"generate\(\): seed: must be a whole number at least 0, got -1"),
        (lambda: generate("a", stop=["x", ""]), r"generate\(\): stop\[1\]: an empty stop string"),
        (lambda: generate("a", stop=["x"] * 17), r"generate\(\): stop: at most 16 stop strings, got 17"),
        (lambda: generate("a", stop=["x", 5]), r"generate\(\): stop\[1\]: must be text, got 5"),
        (lambda: generate("a", stop=5), r"generate\(\): stop: expected text or a list of texts, got the number 5"),
        (lambda: generate("a", model=""), r"generate\(\): model: an empty name"),
        (lambda: generate("a", schema="{}"), r"generate\(\): schema: expected a JSON Schema as a dict, or a pydantic"),
        (lambda: generate("a", schema=Answer(reasoning="", choice=1)), r"generate\(\): schema: expected a JSON Schema"),
        (lambda: generate("a", schema={"enum": {1, 2}}), r"generate\(\): schema: the schema has no JSON form"),
        (lambda: generate("a", schema={"const": float("nan")}), r"generate\(\): schema: the schema has no JSON form"),
        (lambda: retrieve(None, "q"), r"retrieve\(\): retriever: expected a retriever object or function, got None"),
        (lambda: retrieve("q", shelf), r"retrieve\(\): retriever: expected .*, got a value of type str"),
        (lambda: retrieve(shelf, None), r"retrieve\(\): query: must be text, got None"),
        (lambda: retrieve(shelf, "q", 0), r"retrieve\(\): k: must be a whole number at least 1, got 0"),
        (lambda: retrieve(shelf, "q", rung="x"), r"retrieve\(\): rung: 'x' is no rung"),
        (lambda: chat("a"), r"chat\(\): messages: expected a list of messages, got a value of type str"),
        (lambda: chat(user("a")), r"chat\(\): messages: expected a list of messages, got a value of type Message"),
        (lambda: chat([]), r"chat\(\): messages: there are no messages"),
        (lambda: chat(["a"]), r"chat\(\): messages\[0\]: text without a role; write user\(...\)"),
        (lambda: chat([user("a"), 5]), r"chat\(\): messages\[1\]: expected a message, .*, got the number 5"),
        (lambda: chat([("tool", "a")]), r"chat\(\): messages\[0\]: 'tool' is no role; roles are system, user"),
        (lambda: chat([{"role": None, "content": "a"}]), r"chat\(\): messages\[0\].role: None is no role"),
        (lambda: chat([{"role": "user"}]), r"chat\(\): messages\[0\]: the message has no 'content'; it has 'role'"),
        (lambda: chat([{}]), r"chat\(\): messages\[0\]: the message has no 'role'; it has nothing"),
        (
            lambda: chat([{"role": "user", "content": "a", "name": "x"}]),
            r"chat\(\): messages\[0\]: a message has 'role' and 'content' only; 'name' would be lost",
        ),
        (
            lambda: chat([{"role": "user", "content": [{"type": "image", "url": "x"}]}]),
            r"chat\(\): messages\[0\].content\[0\]: of parts with a type only .* is read, got 'type', 'url'",
        ),
        (lambda: chat([{"role": "user", "content": None}]), r"chat\(\): messages\[0\].content: expected text"),
        (lambda: chat([user("a")], top_p=2), r"chat\(\): top_p: must be a number above 0"),
    ],
)
def test_what_cannot_be_read_is_refused_where_it_stands(build: Callable[[], Node], message: str) -> None:
    with pytest.raises(QueryError, match=message):
        build()


def test_a_list_that_contains_itself_is_refused() -> None:
    endless: list[Any] = ["a"]
    endless.append(endless)
    with pytest.raises(QueryError, match="lists are nested more than 100 deep; does one contain itself"):
        seq(endless)


@given(st.recursive(texts() | fragments(), lambda inner: st.lists(inner, max_size=4), max_leaves=20))
def test_any_nest_of_lists_of_texts_and_nodes_builds_a_query(nest: Any) -> None:
    for build in (seq, user, system, assistant):
        verify(build(nest, "?"))
    verify(generate([nest, "?"]))
    verify(commute(nest, "?"))


@given(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.binary(), st.dictionaries(texts(), texts())))
def test_no_other_value_is_ever_read(value: Any) -> None:
    for build in (seq, user, system, assistant, commute, generate):
        with pytest.raises(QueryError, match=r"argument 1|query"):
            build(value)


@pytest.mark.parametrize("number", [10**400, 10**5000, -(10**5000)], ids=["large", "larger", "least"])
def test_numbers_beyond_all_bounds_are_refused_in_few_words(number: int) -> None:
    """Python itself writes out 4,300 digits at most."""
    for call in (
        lambda: generate("a", n=number),
        lambda: generate("a", max_tokens=number),
        lambda: generate("a", temperature=number),
        lambda: generate("a", top_p=number),
        lambda: generate("a", seed=number),
        lambda: generate("a", stop=[number]),  # type: ignore[list-item]
        lambda: commute("a", rung=number),  # type: ignore[arg-type]
        lambda: commute("a", separator=number),  # type: ignore[arg-type]
        lambda: retrieve(str.split, "a", k=number),
        lambda: user(number),  # type: ignore[arg-type]
        lambda: repair(number),
        lambda: to_text(fragment("a", metadata={"a": number * 10**4000})),
    ):
        with pytest.raises(QueryError) as caught:
            call()
        assert len(str(caught.value)) < 300
