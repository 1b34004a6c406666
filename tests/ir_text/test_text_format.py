"""Formatting keeps comments and meaning, and has an end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from strategies import drawer, queries, shelf

from spanflow.ir.nodes import Node
from spanflow.ir.text import format_text, from_text, to_text
from spanflow.ir.text.lexer import tokens
from spanflow.ir.text.source import Source

SOURCE = r'''
; The file's

;   header.
( ; what for
  G :seed ; why
    3
  (✶  ; joined
     (S "short") (x "a"

     "b") ; the rest
     (U """one line""" "two\nlines"
       ; nothing follows
     ))


  :stop [ "a", ; first
  "b"
  ; no more
  ] :max_tokens 5 ; enough
  ) ; done
; The end.
'''

FORMATTED = r'''; The file's

;   header.
; what for
(generate
  :max_tokens 5 ; enough
  :stop [
    "a", ; first
    "b"
    ; no more
  ]
  ; why
  :seed 3
  (seq ; joined
    (system "short")
    (seq "a" "b") ; the rest
    (user
      "one line"
      """
      two
      lines
      """
      ; nothing follows
    ))) ; done
; The end.
'''


def test_comments_stay_with_what_they_are_about() -> None:
    assert format_text(SOURCE) == FORMATTED
    assert format_text(FORMATTED) == FORMATTED
    assert from_text(SOURCE) == from_text(FORMATTED)


def test_lines_are_as_wide_as_asked_for() -> None:
    source = '(commute :rung (repair 32) :anchor none (user "aaaaaaaaaa" "bbbbbbbbbb") (user "c"))'
    assert format_text(source, width=84).splitlines() == [source]
    assert format_text(source, width=44).splitlines() == [
        "(commute :rung (repair 32) :anchor none",
        '  (user "aaaaaaaaaa" "bbbbbbbbbb")',
        '  (user "c"))',
    ]
    assert format_text(source, width=30).splitlines() == [
        "(commute",
        "  :rung (repair 32)",
        "  :anchor none",
        "  (user",
        '    "aaaaaaaaaa"',
        '    "bbbbbbbbbb")',
        '  (user "c"))',
    ]


def test_what_stands_deep_is_indented_by_half_of_the_width_at_most() -> None:
    source = "(user " + "(seq " * 40 + '"long enough for a line of its own"' + ")" * 41
    lines = format_text(source, width=40).splitlines()
    assert max(len(line) - len(line.lstrip()) for line in lines) == 20


def test_an_empty_line_between_operands_stays_one() -> None:
    assert format_text('(seq\n\n  "a"\n\n\n  "b" ; c\n  "d"\n\n)') == '(seq\n  "a"\n\n  "b" ; c\n  "d")\n'


@given(queries(), st.data(), st.integers(1, 120))
def test_formatting_twice_is_formatting_once(query: Node, data: st.DataObject, width: int) -> None:
    retrievers = {"shelf": shelf, "drawer": drawer}
    text = to_text(query, width=width, retrievers=retrievers)
    places = data.draw(st.lists(st.sampled_from(list(tokens(Source(text, "")))), max_size=6))
    for number, token in enumerate(sorted(places, key=lambda token: -token.start)):
        comment = data.draw(st.sampled_from([" ;; {}\n", "\n\n;; {}\n\n", "\n;; {}\n;;\n", "  ;; {}\r\n\t"]))
        text = text[: token.start] + comment.format(number) + text[token.start :]
    assert from_text(text, retrievers=retrievers) == query
    once = format_text(text, width=width)
    assert format_text(once, width=width) == once
    assert from_text(once, retrievers=retrievers) == query
    found = [token.value for token in tokens(Source(once, "")) if token.kind == "comment"]
    assert sorted(found) == sorted(token.value for token in tokens(Source(text, "")) if token.kind == "comment")
