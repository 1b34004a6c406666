"""Retrieves are answered wherever they stand, by whatever retriever."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from strategies import queries

from spanflow.binding import abind, bind
from spanflow.errors import QueryError
from spanflow.ir.fidelity import repair
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Seq, Text
from spanflow.ir.walk import preorder, rebuild


def answers(query: str, k: int = 2) -> list[str]:
    return [f"{query} {n}" for n in range(k)]


def joined(*texts: str, **options: Any) -> Commute:
    return Commute(tuple(Fragment(text) for text in texts), **options)


def texts(node: Node) -> list[str]:
    assert isinstance(node, Commute)
    return [operand.text for operand in node.operands if isinstance(operand, Fragment)]


R = Retrieve(answers, "a")
JOINED = joined("a 0", "a 1")


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (R, JOINED),
        (Seq((Text("x"), R)), Seq((Text("x"), JOINED))),
        (Commute((R, Text("x"))), Commute((JOINED, Text("x")))),
        (Message("user", (R, Text("Q"))), Message("user", (JOINED, Text("Q")))),
        (Chat((Message("user", (R,)),)), Chat((Message("user", (JOINED,)),))),
        (Generate(Seq((Generate(R), R))), Generate(Seq((Generate(JOINED), JOINED)))),
    ],
)
def test_anywhere_in_the_tree(query: Node, expected: Node) -> None:
    assert bind(query) == expected
    assert asyncio.run(abind(query)) == expected


@given(queries())
def test_anywhere_in_any_tree(query: Node) -> None:
    def found(node: Node) -> Node:
        if not isinstance(node, Retrieve):
            return node
        fragments = tuple(Fragment(text) for text in node.retriever(node.query, node.k))
        return Commute(fragments, node.rung, node.anchor) if fragments else Seq(())

    assert bind(query) == rebuild(query, found)


def test_a_query_without_retrieves_is_itself() -> None:
    query = Seq((Text("a"),))
    assert bind(query) is query
    assert asyncio.run(abind(query)) is query


def test_options_of_the_join_are_those_of_the_retrieve() -> None:
    bound = bind(Retrieve(answers, "a", k=1, rung=repair(4), anchor="none"))
    assert bound == joined("a 0", rung=repair(4), anchor="none")


def test_nothing_found_is_an_empty_seq() -> None:
    assert bind(Message("user", (Retrieve(lambda query: [], "a"), Text("Q")))) == Message("user", (Seq(()), Text("Q")))


class ByMethod:
    def retrieve(self, query: str, k: int) -> list[str]:
        return answers(query, k)


class Positional:
    def retrieve(self, query: str, number: int, /) -> list[str]:
        return answers(query, number)


class Invoked:
    """Like a runnable of LangChain, which hands unknown arguments to a function that does not expect them."""

    def invoke(self, query: str, config: object = None, **kwargs: Any) -> list[str]:
        assert not kwargs
        return answers(query, 5)

    async def ainvoke(self, query: str, config: object = None, **kwargs: Any) -> list[str]:
        return self.invoke(query, config, **kwargs)


class InvokedRetriever:
    """Like a retriever of LangChain, which hands k to its search."""

    def _get_relevant_documents(self) -> None: ...

    def invoke(self, query: str, config: object = None, **kwargs: Any) -> list[str]:
        return answers(query, kwargs["k"])


class Searched:
    def search(self, query: str, top_k: int = 9) -> list[str]:
        return answers(query, top_k)


class Called:
    def __call__(self, query: str, **options: Any) -> list[str]:
        return answers(query, options["k"])


async def coroutine(query: str, k: int = 2) -> list[str]:
    return answers(query, k)


class CalledAsync:
    async def __call__(self, query: str) -> list[str]:
        return answers(query, 5)


SYNC = [answers, lambda query: answers(query, 5), ByMethod(), Positional(), Invoked(), InvokedRetriever(), Searched()]


@pytest.mark.parametrize("retriever", [*SYNC, Called()])
def test_retrievers(retriever: Any) -> None:
    assert texts(bind(Retrieve(retriever, "a", k=3))) == ["a 0", "a 1", "a 2"]


@pytest.mark.parametrize("retriever", [*SYNC, Called(), coroutine, CalledAsync(), lambda query: coroutine(query, 3)])
async def test_retrievers_async(retriever: Any) -> None:
    assert texts(await abind(Retrieve(retriever, "a", k=3))) == ["a 0", "a 1", "a 2"]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("plain", Fragment("plain")),
        (Fragment("f", "7", {"p": 1}), Fragment("f", "7", {"p": 1})),
        (Text("t"), Fragment("t")),
        (("text", "id"), Fragment("text", "id")),
        (("text", 7), Fragment("text", "7")),
        (("text", None), Fragment("text")),
        (("text", 0.5), Fragment("text")),
        ((SimpleNamespace(page_content="d", metadata={"p": 1}, id=None), 0.5), Fragment("d", None, {"p": 1})),
        (SimpleNamespace(page_content="d", metadata={"p": 1}, id="x"), Fragment("d", "x", {"p": 1})),
        (SimpleNamespace(text="n"), Fragment("n")),
        ({"text": "m", "id": 3, "page": 4}, Fragment("m", "3", {"page": 4})),
        ({"page_content": "m", "metadata": {"p": 1}}, Fragment("m", None, {"p": 1})),
        ({"content": "m"}, Fragment("m")),
    ],
)
def test_results(found: object, expected: Fragment) -> None:
    bound = bind(Retrieve(lambda query: [found], "a"))
    assert bound == Commute((expected,))


@pytest.mark.parametrize("is_mapping", [False, True])
def test_a_retriever_keeps_its_metadata_and_the_query_its_own(is_mapping: bool) -> None:
    metadata = {"page": 1, "tags": ["a"]}
    found = {"text": "m", "metadata": metadata} if is_mapping else SimpleNamespace(page_content="m", metadata=metadata)
    bound = bind(Retrieve(lambda query: [found], "a"))
    metadata["page"] = 2
    metadata["tags"].append("b")  # type: ignore[attr-defined]
    assert bound == Commute((Fragment("m", None, {"page": 1, "tags": ["a"]}),))
    assert bound.operands[0].metadata == {"page": 1, "tags": ["a"]}  # type: ignore[attr-defined]


def test_results_may_come_one_by_one_and_without_end() -> None:
    def endless(query: str) -> Any:
        while True:
            yield query

    assert texts(bind(Retrieve(endless, "a", k=2))) == ["a", "a"]


def test_equal_questions_are_asked_once() -> None:
    asked: list[str] = []

    def retriever(query: str) -> list[str]:
        asked.append(query)
        return [query]

    query = Seq((Retrieve(retriever, "a"), Retrieve(retriever, "b"), Retrieve(retriever, "a", rung=repair(1))))
    assert bind(query) == Seq((joined("a"), joined("b"), joined("a", rung=repair(1))))
    assert asked == ["a", "b"]
    asyncio.run(abind(query))
    assert sorted(asked) == ["a", "a", "b", "b"]


async def test_questions_are_asked_at_once() -> None:
    """Each waits for all the others, in threads and on the loop."""
    barrier, arrived, both = threading.Barrier(2, timeout=10), asyncio.Event(), asyncio.Event()

    def blocking(query: str) -> list[str]:
        barrier.wait()
        return [query]

    async def first(query: str) -> list[str]:
        arrived.set()
        await asyncio.wait_for(both.wait(), 10)
        return [query]

    async def second(query: str) -> list[str]:
        await asyncio.wait_for(arrived.wait(), 10)
        both.set()
        return [query]

    query = Seq((Retrieve(blocking, "a"), Retrieve(blocking, "b"), Retrieve(first, "c"), Retrieve(second, "d")))
    assert await abind(query) == Seq((joined("a"), joined("b"), joined("c"), joined("d")))


def broken(query: str) -> list[str]:
    raise OSError("index not found")


def broken_later(query: str) -> Any:
    yield "one"
    raise OSError("index not found")


@pytest.mark.parametrize("retriever", [broken, broken_later])
async def test_a_failing_retriever_is_named(retriever: Any) -> None:
    query = Generate(Seq((Text("x"), Message("user", (Retrieve(retriever, "who?"),)))))
    name = retriever.__name__
    message = (
        rf"^\$\.query\.operands\[1\]\.parts\[0\]: retriever {name} failed on the query 'who\?': "
        r"OSError: index not found$"
    )
    with pytest.raises(QueryError, match=message) as caught:
        bind(query)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(QueryError, match=message):
        await abind(query)


async def test_one_failure_cancels_the_others() -> None:
    cancelled = asyncio.Event()

    async def slow(query: str) -> list[str]:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return []

    async def fails(query: str) -> list[str]:
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(QueryError, match="ValueError: no"):
        await abind(Seq((Retrieve(slow, "a"), Retrieve(fails, "b"))))
    assert cancelled.is_set()


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ("text", r"^\$: retriever .*lambda> returned str; it must return a list of text, Fragments, pairs"),
        (None, r"^\$: retriever .*lambda> returned NoneType"),
        ({"text": "a"}, r"^\$: retriever .*lambda> returned dict"),
        (["a", 7], r"^\$: result 1 of retriever .*lambda> is of type int; it must return a list of"),
        ([{"title": "a"}], r"^\$: result 0 of retriever .*lambda> is of type dict"),
    ],
)
async def test_what_a_retriever_must_not_return(found: object, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        bind(Retrieve(lambda query: found, "a"))
    with pytest.raises(QueryError, match=message):
        await abind(Retrieve(lambda query: found, "a"))


def test_an_asynchronous_retriever_needs_abind() -> None:
    with pytest.raises(QueryError, match=r"^\$: retriever coroutine is asynchronous; bind the query with `await abind"):
        bind(Retrieve(coroutine, "a"))


def test_no_retriever_at_all() -> None:
    with pytest.raises(
        QueryError, match=r"^\$: SimpleNamespace is no retriever; a retriever is a function of the query"
    ):
        bind(Retrieve(SimpleNamespace(), "a"))


def test_a_deep_tree() -> None:
    node: Node = R
    for _ in range(5000):
        node = Seq((node,))
    assert list(preorder(bind(node)))[-1][1] == Fragment("a 1")
