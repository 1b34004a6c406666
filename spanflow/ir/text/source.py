"""Where in a source something stands, and the error that shows it."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from spanflow.errors import QueryError
from spanflow.ir.limits import MAX_CHARS

#: Control characters, halves of surrogate pairs, and marks that turn the direction of what follows them.
_UNWANTED = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]|\r(?!\n)")
_SHOWN = 88
_BEFORE = 44


class QuerySyntaxError(QueryError):
    """A text that is no query; the message shows the line, with marks below what is wrong.

    Attributes: `problem` (what is wrong, and what was expected), `filename`, `line` and `column` (both from 1),
    `offset` (characters from the beginning of the source, from 0), `excerpt` (the line, and the marks below it).
    """

    def __init__(self, problem: str, filename: str, line: int, column: int, offset: int, excerpt: str) -> None:
        self.problem = problem
        self.filename = filename
        self.line = line
        self.column = column
        self.offset = offset
        self.excerpt = excerpt
        super().__init__(f"{filename}:{line}:{column}: {problem}\n{excerpt}")


@dataclass(frozen=True, slots=True)
class Source:
    """The text of a query and what to call it."""

    text: str
    filename: str

    def check(self) -> None:
        """Refuse a source that is too long, or holds characters that nobody can see. Raises QuerySyntaxError."""
        if len(self.text) > MAX_CHARS:
            raise self.error(
                0,
                0,
                f"the source has {len(self.text):,} characters, and at most {MAX_CHARS:,} are read at once; split it "
                "into several queries, or build it in Python",
            )
        if found := _UNWANTED.search(self.text):
            raise self.error(found.start(), found.end(), _unwanted(found[0]))

    def error(self, start: int, end: int, problem: str) -> QuerySyntaxError:
        """The error that marks the characters from `start` to `end`."""
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", start)
        line_end = len(self.text) if line_end < 0 else line_end
        line = self.text.count("\n", 0, start) + 1
        excerpt = _excerpt(self.text[line_start:line_end], start - line_start, end - line_start, line)
        return QuerySyntaxError(problem, self.filename, line, start - line_start + 1, start, excerpt)


def _unwanted(character: str) -> str:
    number = ord(character)
    code = f"U+{number:04X}"
    if 0xD800 <= number <= 0xDFFF:
        return (
            f"{code} is half of a surrogate pair, which no tokenizer can read; decode the source again, with "
            "errors='replace' where need be"
        )
    name = unicodedata.name(character, "a control character")
    escape = {"\r": "\\r"}.get(character, f"\\u{number:04x}")
    return f"{code} ({name}) does not show; in a string write {escape} for it, elsewhere leave it out"


def _excerpt(line: str, start: int, end: int, number: int) -> str:
    """The line, or what is around `start` of a long one, and marks below `start` to `end`."""
    first = max(0, start - _BEFORE) if len(line) > _SHOWN else 0
    shown = line[first : first + _SHOWN]
    head = "…" if first else ""
    tail = "…" if first + len(shown) < len(line.rstrip()) else ""
    visible = "".join(map(_visible, shown)).rstrip()
    before = _cells(head) + sum(_cells(_visible(c)) for c in shown[: start - first])
    marked = shown[start - first : max(end, start + 1) - first]
    marks = max(1, sum(_cells(_visible(c)) for c in marked.rstrip()))
    margin = f"{number:>4} | "
    return f"{margin}{head}{visible}{tail}\n{' ' * (len(margin) - 2)}| {' ' * before}{'^' * marks}"


def _visible(character: str) -> str:
    if character == "\t":
        return "    "
    return character if character.isprintable() else "�"


def _cells(text: str) -> int:
    """The columns that a text takes in a terminal."""
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)
