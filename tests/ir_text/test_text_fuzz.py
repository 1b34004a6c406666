"""Whatever is read, it is a query that can be printed, or a QuerySyntaxError; and it is quick."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawer, queries, shelf

from spanflow.ir.nodes import Node
from spanflow.ir.text import QuerySyntaxError, format_text, from_text, to_text
from spanflow.ir.text.grammar import OPERATORS
from spanflow.ir.verify import verify

RETRIEVERS = {"shelf": shelf, "drawer": drawer}
PIECES = [
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    ",",
    ":",
    '"',
    '"""',
    ";",
    "\\",
    "\n",
    "\r\n",
    " ",
    ":n",
    ":rung",
    ":stop",
    ":from",
]
PIECES += [
    "seq",
    "user",
    "commute",
    "generate",
    "fragment",
    "retrieve",
    "chat",
    "repair",
    "moved",
    "shelf",
    "true",
    "null",
]
PIECES += [
    '"a"',
    '"b\\n"',
    "3",
    "-0.5",
    "1e5",
    "1e308",
    "9" * 25,
    "9" * 4000,
    "x",
    "+",
    "✶",
    "é",
    "\ufeff",
    "\x00",
    "\u202e",
    "\ud800",
    "🙂",
    "\\u0041",
]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """A deadline for what must not take long; CPU time, so that busy machines do not fail."""
    start = time.process_time()
    yield
    assert time.process_time() - start < seconds


def check_place(error: QuerySyntaxError, source: str) -> None:
    """An error points into its source, and is short."""
    assert error.line == source.count("\n", 0, error.offset) + 1
    assert 0 <= error.offset <= len(source)
    assert len(str(error)) < 2000


def read(source: str) -> None:
    """Read a source; what is accepted is whole."""
    with within(5):
        try:
            query = from_text(source, retrievers=RETRIEVERS)
        except QuerySyntaxError as refused:
            check_place(refused, source)
            return
    verify(query)
    assert from_text(to_text(query, retrievers=RETRIEVERS), retrievers=RETRIEVERS) == query
    assert from_text(format_text(source), retrievers=RETRIEVERS) == query


@given(st.text())
def test_any_text(source: str) -> None:
    read(source)


@given(st.binary())
def test_any_bytes(source: bytes) -> None:
    read(source.decode("utf-8", "surrogateescape"))
    read(source.decode("latin-1"))


@given(st.lists(st.sampled_from(PIECES), max_size=30), st.sampled_from(["", " "]))
def test_any_pieces(pieces: list[str], between: str) -> None:
    read(between.join(pieces))


@given(queries(), st.data())
def test_a_query_with_a_mistake(query: Node, data: st.DataObject) -> None:
    source = to_text(query, retrievers=RETRIEVERS, width=data.draw(st.sampled_from([30, 100])))
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(source)))
        end = min(len(source), start + data.draw(st.integers(0, 4)))
        piece = data.draw(st.sampled_from([*PIECES, "", source[start : start + 20]]))
        source = source[:start] + piece + source[end:]
    read(source)


@pytest.mark.parametrize(
    "opening", ["(", "[", "{", "(seq ", '{"a":', '(user "', '"""', "(commute :rung ", ";", ":", "\\", '"\\']
)
@pytest.mark.parametrize("prefix", ["", '(fragment "a" :metadata '])
def test_many_times_the_same(prefix: str, opening: str) -> None:
    read(prefix + opening * 20_000)


@pytest.mark.parametrize("word", ["1", "a", '"', "9.", "(", "-", "\ufeff", "é", "\\u0041", "e", ":n"])
def test_long_words(word: str) -> None:
    read(f"(user {word * 100_000})")
    read(f'(generate :n {word * 100_000} "a")')


@pytest.mark.parametrize(
    "number", ["9" * 4000, "-" + "9" * 3999, "1" + "0" * 19, "1e308", "-0", "0.0", "1e-400", "1e9999"]
)
def test_huge_numbers_in_all_options(number: str) -> None:
    for options in OPERATORS.values():
        for option in options.options:
            for value in (number, f"(repair {number})", f"[{number}]", f'{{"a": {number}}}'):
                read(f'({options.name} :{option} {value} "a")')


@pytest.mark.parametrize("inside", ["[", '{"a": '])
def test_deep_values(inside: str) -> None:
    closing = {"[": "]", "{": "}"}[inside[0]]
    for option in ("fragment :metadata", "generate :schema", "generate :stop"):
        for depth in (99, 101, 20_000):
            read(f'({option} {{"a": {inside * depth}1{closing * depth}}} "a")')


@pytest.mark.parametrize(
    "word", ["\u0300", "\u200d", "\u00a0", "\u2028", "\ufeff", "\U000e0001", "\uffff", "٣", "ß", "İ", "ǅ"]
)
def test_odd_characters_anywhere(word: str) -> None:
    for source in ('(user "a")', '(generate :n 2 ; c\n "a")', '(fragment :metadata {"k": [1]} "a")'):
        for position in range(len(source) + 1):
            read(source[:position] + word + source[position:])
