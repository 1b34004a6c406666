"""What spnl can say is written so that it means the same; what it cannot say is refused, with the reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import queries, shelf, texts

from spanflow import chat, commute, fragment, generate, retrieve, seq, system, user
from spanflow.errors import QueryError
from spanflow.ir.denotation import denote
from spanflow.ir.json import from_spnl, to_spnl
from spanflow.ir.nodes import Chat, Commute, Generate, Message, Node, Sampling, Seq, Text
from spanflow.ir.verify import verify
from spanflow.ir.walk import preorder, rebuild


def sayable() -> st.SearchStrategy[Node]:
    """Queries that spnl can say."""
    parts = st.lists(texts().map(Text) | st.lists(texts().map(Text)).map(lambda some: Seq(tuple(some))), max_size=3)
    messages = st.builds(Message, st.sampled_from(["system", "user", "assistant"]), parts.map(tuple))
    temperatures = st.sampled_from([0.0, 0.6, 0.25])
    samplings = st.builds(Sampling, max_tokens=st.none() | st.integers(1, 99), temperature=temperatures)

    def around(inner: st.SearchStrategy[Node]) -> st.SearchStrategy[Node]:
        single = inner.map(lambda node: replace(node, n=1) if isinstance(node, Generate) else node)
        read = single.map(lambda node: Seq((Message("user", (Text("Read this."),)), node)))
        return st.one_of(
            st.lists(single, max_size=3).map(lambda some: Seq(tuple(some))),
            st.lists(inner, min_size=1, max_size=3).map(lambda some: Commute(tuple(some))),
            st.builds(Generate, read, samplings, st.sampled_from([1, 3]), st.sampled_from([None, "other"])),
            st.builds(Chat, read.map(lambda node: (node,)), samplings),
        )

    return st.recursive(messages, around, max_leaves=8)


def plainly(query: Node) -> Node:
    """A chat is a generate, a generate without a model is one of the default model, and a message is one text."""

    def change(node: Node) -> Node:
        if isinstance(node, Message):
            return Message(node.role, (Text("".join(part.text for _, part in preorder(node) if type(part) is Text)),))
        if isinstance(node, Chat):
            return Generate(Seq(node.messages), node.sampling, model="default")
        return replace(node, model=node.model or "default") if isinstance(node, Generate) else node

    return rebuild(query, change)


@given(sayable())
def test_what_is_written_means_the_same(query: Node) -> None:
    verify(query)
    # A message before it, for a query may say nothing at all.
    query = Seq((Message("user", (Text("Hello."),)), Commute((query,))))
    data = to_spnl(query, model="default")
    assert json.loads(json.dumps(data)) == data
    assert denote(from_spnl(data)) == denote(plainly(query))
    assert to_spnl(from_spnl(data)) == data


@given(queries())
def test_any_query_is_written_or_refused(query: Node) -> None:
    try:
        data = to_spnl(query, model="default")
    except QueryError as error:
        refused = str(error)
        assert re.match(r"\$[\w.\[\]]*: ", refused)
        return
    assert denote(from_spnl(data)) == denote(plainly(query))


def test_a_judge() -> None:
    candidates = commute(generate(user("A name?"), temperature=0.6, n=4), generate(user("A", " name?"), max_tokens=5))
    query = generate(seq(system("Pick one."), candidates, Seq(())), model="big", max_tokens=3)
    small = {"model": "small", "input": {"user": "A name?"}}
    repeated = {"repeat": {"n": 4, "g": small}}
    single = {"g": small | {"max_tokens": 5, "temperature": 0.0}}
    judge = {"cross": [{"system": "Pick one."}, {"plus": [repeated, single]}]}
    assert to_spnl(query, model="small") == {"g": {"model": "big", "input": judge, "max_tokens": 3, "temperature": 0.0}}


def test_a_chat_is_a_generate() -> None:
    query = chat([("system", "Be brief."), ("user", "Why?")], temperature=0.6)
    assert to_spnl(query, model="m") == {
        "g": {"model": "m", "input": {"cross": [{"system": "Be brief."}, {"user": "Why?"}]}}
    }


ASK = generate(user("a"), model="m")
PROBLEMS: list[tuple[Any, str]] = [
    (generate(user("a")), "$: generate: spnl has no default model; name one, as in to_spnl(query, model='...')"),
    (chat([user("a")]), "$: chat: spnl has no default model"),
    (
        seq(user("a"), commute(user("b"), rung="moved")),
        "$.operands[1]: commute: spnl cannot say rung=moved; leave it to",
    ),
    (commute(user("b"), anchor="none"), "$: commute: spnl cannot say anchor=none"),
    (commute(user("b"), associative=True), "$: commute: spnl cannot say associative=True"),
    (commute(user("b"), separator="-"), "$: commute: spnl cannot say separator=-"),
    (user(commute("a", "b")), "$.parts[0]: commute: spnl joins messages, not texts; put each text into a message"),
    (user(commute(seq("a", "b"), "c")), "$.parts[0]: commute: spnl joins messages, not texts"),
    (
        seq(user("a"), user(fragment("b"))),
        "$.operands[1].parts[0]: fragment: spnl has no fragments; put the text into a",
    ),
    (seq(user("a"), "b"), "$: there is text outside of a message, and spnl has messages only; put it into user(...)"),
    (seq("a", "b"), "$: there is text outside of a message"),
    (generate("a", model="m"), "$: there is text outside of a message"),
    (seq(user("a"), retrieve(shelf, "b")), "$.operands[1]: retrieve: spnl embeds documents itself; bind() the query"),
    (replace(ASK, reduce="tree"), "$: generate: spnl has no trees of judges (reduce, arity)"),
    (replace(ASK, arity=3), "$: generate: spnl has no trees of judges"),
    (commute(replace(ASK, sampling=Sampling(top_p=0.5))), "$.operands[0]: generate: spnl cannot say top_p"),
    (replace(ASK, sampling=Sampling(stop=("a",))), "$: generate: spnl cannot say stop"),
    (replace(ASK, sampling=Sampling(seed=0)), "$: generate: spnl cannot say seed"),
    (replace(ASK, sampling=Sampling(schema="{}")), "$: generate: spnl cannot say schema"),
    (
        replace(ASK, sampling=Sampling(max_tokens=2**31)),
        "$: generate: max_tokens is 2,147,483,648, and at most 2,147,483,647",
    ),
    (Seq(()), "$: an empty seq says nothing that spnl could say"),
    (Commute((Seq(()),)), "$: an empty seq says nothing"),
    (Commute(()), "$: commute: there are no operands"),
]


@pytest.mark.parametrize(("query", "problem"), PROBLEMS, ids=[problem[:50] for _, problem in PROBLEMS])
def test_what_spnl_cannot_say_is_refused(query: Node, problem: str) -> None:
    with pytest.raises(QueryError) as caught:
        to_spnl(query)
    assert str(caught.value).startswith(problem)
