"""Characters to tokens, one after the other."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from spanflow.ir.numbers import MAX_DIGITS
from spanflow.ir.text.source import Source
from spanflow.ir.text.strings import QUOTES, EscapeError, unblocked, unquoted

TokenKind: TypeAlias = Literal[
    "(", ")", "[", "]", "{", "}", ",", ":", "key", "word", "number", "text", "comment", "end"
]

_SPACE = re.compile(r"[ \t\r\n]+")
_COMMENT = re.compile(r";[^\n]*")
_BLOCK = re.compile(r'"""((?>[^"\\]+|\\.|"(?!""))*+)"""', re.DOTALL)
_QUOTED = re.compile(r'"((?>[^"\\\n]+|\\.)*+)"')
_KEY = re.compile(r":([A-Za-z_][\w-]*)", re.ASCII)
_WORD = re.compile(r"[^\s()\[\]{}\",:;]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LIKE_A_NUMBER = re.compile(r"[-+.]?[0-9]")


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the source. `lines_before` counts the ends of lines between it and the token before it.

    `value` is the text of a string, a word, a keyword or a comment, and the number of a number.
    """

    kind: TokenKind
    start: int
    end: int
    lines_before: int
    value: Any = None


def tokens(source: Source) -> Iterator[Token]:
    """The tokens of a source; the last one is `end`. Raises QuerySyntaxError.

    A colon begins a keyword (`:rung`), and inside brackets and braces separates a key from its value.
    """
    text = source.text
    position = 1 if text.startswith("\ufeff") else 0
    lines = 0
    in_data = 0
    while True:
        if space := _SPACE.match(text, position):
            lines = text.count("\n", position, space.end())
            position = space.end()
        if position >= len(text):
            yield Token("end", position, position, lines)
            return
        token = _token(source, position, lines, bool(in_data))
        if token.kind in ("[", "{"):
            in_data += 1
        elif token.kind in ("]", "}"):
            in_data = max(0, in_data - 1)
        yield token
        position, lines = token.end, 0


def _token(source: Source, start: int, lines: int, in_data: bool) -> Token:
    text = source.text
    match text[start]:
        case "(" | ")" | "[" | "]" | "{" | "}" | "," as kind:
            return Token(kind, start, start + 1, lines)
        case ";":
            end = _end(_COMMENT.match(text, start))
            return Token("comment", start, end, lines, text[start:end].rstrip())
        case '"':
            return _string(source, start, lines)
        case ":":
            if in_data:
                return Token(":", start, start + 1, lines)
            if found := _KEY.match(text, start):
                return Token("key", start, found.end(), lines, found[1])
            raise source.error(start, start + 1, "expected the name of an option after ':', as in :max_tokens 64")
        case _:
            return _word(source, start, lines)


def _string(source: Source, start: int, lines: int) -> Token:
    text = source.text
    is_block = text.startswith(QUOTES, start)
    found = (_BLOCK if is_block else _QUOTED).match(text, start)
    if found is None:
        if is_block:
            raise source.error(start, start + 3, 'this """ is never closed; write \\""" where a text has three quotes')
        line_end = text.find("\n", start)
        raise source.error(
            start,
            len(text) if line_end < 0 else line_end,
            'this string does not end on its line; close it with ", write \\n for a new line, or use a block '
            'between lines of """',
        )
    try:
        value = unblocked(found[1]) if is_block else unquoted(found[1])
    except EscapeError as error:
        first = found.start(1)
        raise source.error(first + error.start, first + error.end, error.problem) from None
    return Token("text", start, found.end(), lines, value)


def _word(source: Source, start: int, lines: int) -> Token:
    text = source.text
    found = _WORD.match(text, start)
    if found is None:
        code = f"U+{ord(text[start]):04X}"
        raise source.error(start, start + 1, f"{code} is no space here; use plain spaces, or put it into a string")
    word = found[0]
    if number := _NUMBER.fullmatch(word):
        return Token("number", start, found.end(), lines, _number(source, start, number))
    if _LIKE_A_NUMBER.match(word):
        raise source.error(start, found.end(), "this is no number; numbers look like 3, -3, 0.7 or 1e-3")
    if word.startswith("#"):
        raise source.error(start, found.end(), "'#' begins nothing here; a comment begins with ';'")
    if word.startswith("'"):
        raise source.error(start, found.end(), 'text stands between double quotes: "..."')
    return Token("word", start, found.end(), lines, word)


def _number(source: Source, start: int, found: re.Match[str]) -> int | float:
    end = start + len(found[0])
    if len(found[0]) > MAX_DIGITS:
        raise source.error(start, end, f"this number has {len(found[0]):,} digits; at most {MAX_DIGITS:,} are read")
    if not found[1] and not found[2]:
        return int(found[0])
    number = float(found[0])
    if math.isinf(number):
        raise source.error(start, end, "this number is larger than any that can be used")
    return number


def _end(found: re.Match[str] | None) -> int:
    assert found is not None
    return found.end()
