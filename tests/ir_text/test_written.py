"""Nodes are found where they are written, with the comments that go with them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawer, queries, shelf

from spanflow.ir.nodes import Fragment, Generate, Message, Node, Retrieve, Text
from spanflow.ir.text import QuerySyntaxError, from_text, to_text
from spanflow.ir.text.written import WrittenQuery
from spanflow.ir.walk import preorder

RETRIEVERS = {"shelf": shelf, "drawer": drawer}


@given(queries(), st.sampled_from([24, 60, 10**6]))
def test_each_node_is_found(query: Node, width: int) -> None:
    source = to_text(query, width=width, retrievers=RETRIEVERS)
    written = WrittenQuery(source, "<query>")
    lines = source.split("\n")
    before = (0, 0)
    for path, node in preorder(query):
        found = written.find(path)
        rest = lines[found.line - 1][found.column - 1 :]
        word = rest[1:].split(" ")[0].split(")")[0] if rest.startswith("(") else ""
        names = {Text: "", Message: getattr(node, "role", "")}
        assert rest[0] == ('"' if type(node) is Text else "(")
        assert word == names.get(type(node), type(node).__name__.lower())
        assert (found.line, found.column) > before  # in reading order, each at a place of its own
        assert found.comments == ()
        before = (found.line, found.column)


COMMENTED = """\
; all
(G ; head
  ; option above
  :n 2 ; option
  ; query
  (x
    (U "a") ; first
    "b"     ; second
  )
) ; end
; after
"""


@pytest.mark.parametrize(
    ("path", "place", "comments"),
    [
        ("$", (2, 1), ["; all", "; end", "; head", "; option above", "; option"]),
        ("$.query", (6, 3), ["; query"]),
        ("$.query.operands[0]", (7, 5), ["; query", "; first"]),
        ("$.query.operands[0].parts[0]", (7, 8), ["; query", "; first"]),
        ("$.query.operands[1]", (8, 5), ["; query", "; second"]),
    ],
)
def test_comments_go_with_a_node_and_with_what_is_in_it(path: str, place: tuple[int, int], comments: list[str]) -> None:
    found = WrittenQuery(COMMENTED, "<query>").find(path)
    assert (found.line, found.column) == place
    of_all = ["; all", "; end", "; head", "; option above", "; option"]
    assert list(found.comments) == (comments if path == "$" else of_all + comments)


def test_lines_may_end_in_any_way() -> None:
    found = WrittenQuery('\ufeff(seq\r\n  "a"\r\n  "b")', "<query>").find("$.operands[1]")
    assert (found.line, found.column) == (3, 3)


def test_leaves_are_found_at_their_brackets() -> None:
    query = from_text('(G (x (F :id "d" "a") (R :from shelf "b")))', retrievers=RETRIEVERS)
    assert isinstance(query, Generate)
    places = [(type(node), path) for path, node in preorder(query) if isinstance(node, Fragment | Retrieve)]
    written = WrittenQuery(to_text(query, retrievers=RETRIEVERS), "<query>")
    assert [(kind, written.find(path).column) for kind, path in places] == [(Fragment, 16), (Retrieve, 39)]


def test_what_is_no_query_is_refused() -> None:
    with pytest.raises(QuerySyntaxError, match=r"^q\.span:1:1: "):
        WrittenQuery("(", "q.span")
