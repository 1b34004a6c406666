"""Findings in the text form have lines, and comments silence them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import drawer, queries, shelf

from spanflow.ir.nodes import Node, Text
from spanflow.ir.text import QuerySyntaxError, to_text
from spanflow.ir.walk import rebuild
from spanflow.optimizer.lint import lint, lint_text

WRITTEN = """\
; A judge.
(generate
  (seq
    (system "Today is 2025-05-03.")  ; {head}
    (commute
      ; {above}
      (user
        \"\"\"
        Document 1:
        the sky
        \"\"\")
      (user "See document 1.")) ; {group}
    (user "Which?")))
"""
KEPT = {"head": "-", "above": "-", "group": "-"}


def placed(source: str) -> list[tuple[int | None, int | None, str]]:
    return [(finding.line, finding.column, finding.code) for finding in lint_text(source)]


def test_findings_in_text_have_lines() -> None:
    assert placed(WRITTEN.format(**KEPT)) == [(4, 13, "SF005"), (8, 9, "SF001"), (12, 13, "SF001")]
    assert str(lint_text(WRITTEN.format(**KEPT))[1]).startswith("8:9: SF001 'Document 1:' speaks of an order")
    assert str(lint_text('(generate "{answer}")')[0]).startswith("1:11: SF007 ")


@pytest.mark.parametrize(
    ("comments", "left"),
    [
        ({"head": "noqa"}, [8, 12]),
        ({"head": "A date. NOQA: sf005"}, [8, 12]),
        ({"head": "noqa: SF001"}, [4, 8, 12]),
        ({"head": "noqa: SF001, SF005"}, [8, 12]),
        ({"head": "noqa: it changes once a year"}, [4, 8, 12]),
        ({"above": "noqa: SF001"}, [4, 12]),
        ({"above": "noqa:SF005"}, [4, 8, 12]),
        ({"group": "noqa: SF001"}, [4]),
    ],
    ids=str,
)
def test_comments_silence_what_is_found_where_they_stand(comments: dict[str, str], left: list[int]) -> None:
    assert [line for line, _, _ in placed(WRITTEN.format(**KEPT | comments))] == left


def test_a_comment_above_all_silences_all() -> None:
    assert placed(WRITTEN.format(**KEPT).replace("A judge.", "noqa")) == []
    assert placed(WRITTEN.format(**KEPT).replace("(generate", "(generate :max_tokens 8 ; noqa\n")) == []


@given(queries(max_leaves=16), st.sampled_from([30, 100]))
def test_the_same_is_found_in_text(root: Node, width: int) -> None:
    root = rebuild(root, lambda node: Text("Rate {answer}.") if node == Text("a") else node)
    retrievers = {"shelf": shelf, "drawer": drawer}
    source = to_text(root, width=width, retrievers=retrievers)
    found_in_text = lint_text(source, retrievers=retrievers, max_model_len=64)
    without_lines = [replace(finding, line=None, column=None) for finding in found_in_text]
    assert sorted(without_lines, key=str) == sorted(lint(root, max_model_len=64), key=str)
    places = [(finding.line, finding.column) for finding in found_in_text]
    assert places == sorted(places)  # type: ignore[type-var]
    lines = source.split("\n")
    for finding in found_in_text:
        assert finding.line is not None
        assert finding.column is not None
        assert lines[finding.line - 1][finding.column - 1] in '("'


def test_what_is_no_query_in_text_is_refused_where_it_stands() -> None:
    with pytest.raises(QuerySyntaxError, match=r"^q\.span:1:11: commute: there are no operands"):
        lint_text("(generate (commute))", filename="q.span")
