"""Strings as they are written: in quotes on one line, or as a block between lines of three quotes.

A block begins on the line after its opening quotes; its closing quotes stand alone on their line, and what stands
before them there is taken from the beginning of every line. The end of the last line is no part of the text.
Escapes mean the same in both.
"""

from __future__ import annotations

import re

QUOTES = '"""'

_NAMED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_WRITTEN = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
_SPECIAL = re.compile(r'["\\\x00-\x1f\x7f-\xa0\xad]|[^\x00-\xff]')
_SPECIAL_IN_BLOCK = re.compile(r'\\|"""|[\x00-\x1f\x7f-\xa0\xad]|[^\x00-\xff]')
_ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.?))",
    re.DOTALL,
)


class EscapeError(ValueError):
    """An escape, or the layout of a block, that means nothing. `start` and `end` are positions in what was read."""

    def __init__(self, problem: str, start: int, end: int) -> None:
        super().__init__(problem)
        self.problem = problem
        self.start = start
        self.end = end


def quoted(text: str) -> str:
    """A text in quotes, on one line; what does not show is escaped."""
    return f'"{_SPECIAL.sub(_escape, text)}"'


def is_block(text: str) -> bool:
    """Whether a text reads better as a block: it has more than one line that says something."""
    return "\n" in text.strip("\n")


def block_lines(text: str) -> list[str]:
    """The lines of a block, without quotes and indentation."""
    return [_block_line(line) for line in text.split("\n")]


def unquoted(body: str) -> str:
    """The text of what stands between quotes. Raises EscapeError."""
    return _ESCAPE.sub(_meaning, body) if "\\" in body else body


def unblocked(body: str) -> str:
    """The text of what stands between lines of three quotes. Raises EscapeError."""
    if "\n" not in body:
        return unquoted(body)
    lines = body.replace("\r\n", "\n").split("\n")
    if lines[0].strip(" \t"):
        raise EscapeError('a block of several lines begins on the line after its """', 0, len(lines[0]))
    indent = lines[-1]
    if indent.strip(" \t"):
        start = body.rfind("\n") + 1
        raise EscapeError('the """ that ends a block stands alone on its line', start, len(body))
    texts: list[str] = []
    start = body.find("\n") + 1
    for line in lines[1:-1]:
        if line.startswith(indent):
            texts.append(line[len(indent) :])
        elif not line.strip(" \t"):
            texts.append("")
        else:
            raise EscapeError(
                f'this line is indented less than the """ that ends the block ({len(indent)} characters)',
                start,
                start + len(line),
            )
        start = body.find("\n", start) + 1
    try:
        return unquoted("\n".join(texts))
    except EscapeError:
        unquoted(body)  # the same escape, where it stands in the source
        raise


def _block_line(line: str) -> str:
    written = _SPECIAL_IN_BLOCK.sub(_escape, line)
    # Editors take spaces away from the ends of lines.
    return f"{written[:-1]}\\u0020" if written.endswith(" ") else written


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if character == QUOTES:
        return '\\"\\"\\"'
    if written := _WRITTEN.get(character):
        return written
    if character.isprintable():
        return character
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _meaning(found: re.Match[str]) -> str:
    high, low, short, long, named = found.groups()
    if high:
        return chr(0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00)
    if short or long:
        number = int(short or long, 16)
        if number > 0x10FFFF:
            raise EscapeError(f"{found[0]} is beyond the last character, \\U0010ffff", *found.span())
        if 0xD800 <= number <= 0xDFFF:
            raise EscapeError(
                f"{found[0]} is half of a surrogate pair, which no tokenizer can read; write the character itself, "
                "or both halves",
                *found.span(),
            )
        return chr(number)
    if named in _NAMED:
        return _NAMED[named]
    raise EscapeError(
        r"unknown escape; known are \n \r \t \" \\ \/ \b \f \uXXXX and \UXXXXXXXX, and \\ writes a backslash",
        *found.span(),
    )
