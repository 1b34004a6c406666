"""What is printed is read back as the same query."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawer, queries, shelf

from spanflow import commute, fragment, generate, retrieve, seq, user
from spanflow.errors import QueryError
from spanflow.ir.nodes import Commute, Fragment, Generate, Message, Node, Sampling, Seq, Text
from spanflow.ir.text import format_text, from_text, to_text

RETRIEVERS = {"shelf": shelf, "top drawer; (left)": drawer}


@given(queries(), st.sampled_from([1, 40, 100, 10**9]))
def test_what_is_printed_reads_back(query: Node, width: int) -> None:
    text = to_text(query, width=width, retrievers=RETRIEVERS)
    assert from_text(text, retrievers=RETRIEVERS) == query
    assert format_text(text, width=width) == text + "\n"
    assert to_text(from_text(text, retrievers=RETRIEVERS), width=width, retrievers=RETRIEVERS) == text


@given(queries())
def test_a_printed_query_can_be_stored_anywhere(query: Node) -> None:
    text = to_text(query, retrievers=RETRIEVERS)
    assert all(c.isprintable() or c == "\n" for c in text)
    assert all(line == line.rstrip() for line in text.split("\n"))
    assert from_text(text.encode().decode(), retrievers=RETRIEVERS) == query


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_everywhere(text: str) -> None:
    query = Message("user", (Text(text), Fragment(text, text, {text: [text]})))
    assert from_text(to_text(query, width=30)) == query


def test_depth_is_no_limit() -> None:
    query: Node = Text("down here\nin two lines")
    for level in range(5_000):
        query = Seq((query,)) if level % 2 else Commute((query, Text("beside it")))
    text = to_text(query)
    assert from_text(text) == query
    assert format_text(text) == text + "\n"
    assert sorted(map(len, text.split("\n")))[-5:-1] < [100] * 4  # the last line closes most of them
    assert from_text(to_text(query, width=10**9)) == query


def test_a_small_tree_that_is_large_on_paper_is_refused() -> None:
    query: Node = Text("x")
    for _ in range(60):
        query = Seq((query, query))
    with pytest.raises(QueryError, match=r"more than 1,000,000 nodes .* counts at each"):
        to_text(query)


def test_a_text_too_long_to_be_read_again_is_not_written() -> None:
    with pytest.raises(QueryError, match=r"^\$: written out, this query has 16,777,2\d\d characters, and at most"):
        to_text(Text("x" * 2**24))


def test_equal_queries_have_equal_texts() -> None:
    one = Fragment("x", metadata={"b": (1, 2), "a": None})
    other = Fragment("x", metadata={"a": None, "b": [1, 2]})
    assert one == other
    assert to_text(one) == to_text(other) == '(fragment :metadata {"a": null, "b": [1, 2]} "x")'


def test_whole_numbers_and_fractions_are_one_temperature() -> None:
    whole = Generate(Text("x"), Sampling(temperature=1, top_p=1))
    assert to_text(whole) == '(generate :temperature 1.0 "x")'
    assert from_text('(generate :temperature 1 "x")') == whole == generate("x", temperature=1.0)
    assert Generate(Text("x"), Sampling(temperature=-0.0)) == Generate(Text("x"))


def test_a_schema_keeps_the_order_of_its_keys() -> None:
    query = generate("x", schema={"z": {"type": "string"}, "a": True})
    assert to_text(query) == '(generate :schema {"z": {"type": "string"}, "a": true} "x")'
    assert from_text(to_text(query)) == query


@pytest.mark.parametrize("schema", ['{"a": 1}', '{"a":1,"a":2}', "{", "[]", "true", "NaN", "[" * 900, '{"a":NaN}'])
def test_a_schema_that_is_no_plain_object_is_kept_as_it_is(schema: str) -> None:
    query = Generate(Text("x"), Sampling(schema=schema))
    assert from_text(to_text(query)) == query


def test_retrievers_are_named_by_the_mapping() -> None:
    query = commute(retrieve(shelf, "a"), retrieve(drawer, "b"))
    text = to_text(query, retrievers=RETRIEVERS)
    assert text == '(commute (retrieve :from shelf "a") (retrieve :from "top drawer; (left)" "b"))'
    with pytest.raises(QueryError, match=r"^\$\.operands\[1\]: retrieve: this retriever, a function, is none of"):
        to_text(query, retrievers={"shelf": shelf})


def test_without_a_mapping_retrievers_have_their_own_names() -> None:
    class Archive:
        def search(self, query: str) -> list[str]:
            return []

    one = Archive()
    query = seq(retrieve(one, "a"), retrieve(shelf, "b"), retrieve(one, "c"))
    assert (
        to_text(query) == '(seq (retrieve :from Archive "a") (retrieve :from shelf "b") (retrieve :from Archive "c"))'
    )
    assert from_text(to_text(query), retrievers={"Archive": one, "shelf": shelf}) == query
    with pytest.raises(QueryError, match=r"^\$\.operands\[1\]: .* two retrievers are called 'Archive'"):
        to_text(seq(retrieve(one, "a"), retrieve(Archive(), "b")))


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"a": object()}, r"metadata\.a: a value of type object has no JSON form"),
        ({"a": [1, {"b c": float("nan")}]}, r'metadata\.a\[1\]\["b c"\]: nan has no JSON form'),
        ({1: "a"}, "metadata: keys must be text, got 1"),
        ({"a": "\ud800"}, r"metadata\.a: the character at position 0 is half of a surrogate pair"),
    ],
)
def test_metadata_that_no_text_can_say_is_refused_where_it_stands(metadata: dict[str, object], problem: str) -> None:
    with pytest.raises(QueryError, match=rf"^\$\.parts\[1\]: fragment: {problem}"):
        to_text(user("x", fragment("y", metadata=metadata)))


def test_what_is_no_query_is_not_printed() -> None:
    with pytest.raises(QueryError, match="commute: there are no operands"):
        to_text(Commute(()))
    with pytest.raises(QueryError, match="str is no node"):
        to_text("x")  # type: ignore[arg-type]
