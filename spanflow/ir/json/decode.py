"""JSON text to values and back, without recursion: a query may be nested deeper than the standard reader goes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from spanflow.errors import QueryError
from spanflow.ir.json.path import ROOT, described
from spanflow.ir.limits import MAX_CHARS, MAX_DEPTH
from spanflow.ir.numbers import MAX_DIGITS

_SPACE = re.compile(r"[ \t\r\n]*")
_STRING = re.compile(r'"((?>[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+)"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORD = re.compile(r"\w+")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
#: A node is an object in a list.
_MAX_NESTING = 2 * MAX_DEPTH
_MAX_INDENT = 60


def decode(text: str) -> Any:
    """The value that a JSON text says. Raises QueryError with path, line and column.

    Stricter than most readers: a key may come once, and numbers must fit a float, or have 4,000 digits at most.
    """
    if len(text) > MAX_CHARS:
        raise QueryError(
            f"$: the JSON has {len(text):,} characters, and at most {MAX_CHARS:,} are read at once; split it into "
            "several queries"
        )
    return _Decoder(text).run()


def loaded(data: object) -> dict[str, Any]:
    """An object, from JSON text or as it is. Raises QueryError."""
    if isinstance(data, bytes | bytearray):
        try:
            data = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise QueryError(f"$: not JSON: byte {error.start} is no UTF-8; decode it first") from None
    value = decode(data) if isinstance(data, str) else dict(data) if isinstance(data, Mapping) else data
    if isinstance(value, dict):
        return value
    raise QueryError(f"$: expected an object, got {described(value)}")


class _Decoder:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 1 if text.startswith("\ufeff") else 0
        #: Open lists and objects, each with the key whose value comes next.
        self.stack: list[tuple[list[Any] | dict[str, Any], str]] = []

    def run(self) -> Any:
        while True:
            self._skip()
            value = self._open_or_atom()
            if value is _OPENED:
                continue
            while self.stack:
                value = self._put(value)
                if value is _OPENED:
                    break
            else:
                self._skip()
                if self.position < len(self.text):
                    self._fail("expected the end")
                return value

    def _open_or_atom(self) -> Any:
        """An atom or an empty list or object; of any other the beginning is read, up to its first value."""
        character = self.text[self.position : self.position + 1]
        if character == "{":
            return self._open({}, "}")
        if character == "[":
            return self._open([], "]")
        if character == '"':
            return self._string()
        if number := _NUMBER.match(self.text, self.position):
            return self._number(number)
        word = _WORD.match(self.text, self.position)
        if word is not None and word[0] in _WORDS:
            self.position = word.end()
            return _WORDS[word[0]]
        return self._fail("expected a value")

    def _open(self, container: list[Any] | dict[str, Any], closer: str) -> Any:
        if len(self.stack) >= _MAX_NESTING:
            self._fail(f"nested more than {_MAX_NESTING:,} levels deep")
        self.position += 1
        self._skip()
        if self.text.startswith(closer, self.position):
            self.position += 1
            return container
        self.stack.append((container, ""))
        if isinstance(container, dict):
            self._key(container)
        return _OPENED

    def _put(self, value: Any) -> Any:
        """Put a value into the innermost list or object, and read on: the whole where it closes."""
        container, key = self.stack[-1]
        if isinstance(container, dict):
            container[key] = value
        else:
            container.append(value)
        closer = "}" if isinstance(container, dict) else "]"
        self._skip()
        if self.text.startswith(closer, self.position):
            self.position += 1
            self.stack.pop()
            return container
        if not self.text.startswith(",", self.position):
            self._fail(f"expected ',' or {closer!r}", inside=False)
        self.position += 1
        if isinstance(container, dict):
            self._skip()
            self._key(container)
        return _OPENED

    def _key(self, container: dict[str, Any]) -> None:
        start = self.position
        if not self.text.startswith('"', start):
            self._fail("expected a key in double quotes", inside=False)
        key = self._string()
        if key in container:
            self.position = start
            self._fail(f"the key {key[:40]!a} comes a second time", inside=False)
        self.stack[-1] = (container, key)
        self._skip()
        if not self.text.startswith(":", self.position):
            self._fail("expected ':'")
        self.position += 1

    def _string(self) -> str:
        found = _STRING.match(self.text, self.position)
        if found is None:
            self._fail("a string that does not end, or has an escape or a control character that JSON does not know")
        self.position = found.end()
        if "\\" not in found[1]:
            return found[1]
        value: str = json.loads(found[0])
        return value

    def _number(self, found: re.Match[str]) -> int | float:
        if len(found[0]) > MAX_DIGITS:
            self._fail(f"a number of {len(found[0]):,} digits; at most {MAX_DIGITS:,} are read")
        value = float(found[0]) if found[1] or found[2] else int(found[0])
        if isinstance(value, float) and math.isinf(value):
            self._fail("a number larger than any that can be used")
        self.position = found.end()
        return value

    def _skip(self) -> None:
        found = _SPACE.match(self.text, self.position)
        assert found is not None
        self.position = found.end()

    def _fail(self, problem: str, *, inside: bool = True) -> NoReturn:
        """The error at this position; it is about a value `inside` of the innermost list or object, or about that."""
        place = ROOT
        for container, key in self.stack if inside else self.stack[:-1]:
            place = place.at(key if isinstance(container, dict) else len(container))
        line = self.text.count("\n", 0, self.position) + 1
        column = self.position - self.text.rfind("\n", 0, self.position)
        rest = self.text[self.position : self.position + 20]
        got = (f", got {rest!a}" if rest else ", got the end") if problem.startswith("expected") else ""
        raise QueryError(f"{place}: not JSON: {problem}{got} (line {line}, column {column})")


#: Stands for a list or an object whose beginning was read.
_OPENED = object()


def encode(value: Any, indent: int | None = None) -> str:
    """The JSON text of values of dict, list, tuple, str, int, float, bool and None; `indent` as in `json.dumps`.

    However deep it stands, nothing is indented by more than sixty characters.
    """
    return "".join(_pieces(value, indent))


def _pieces(root: Any, indent: int | None) -> Iterator[str]:
    stack: list[tuple[Any, int, bool]] = [(root, 0, False)]
    while stack:
        value, level, is_text = stack.pop()
        if is_text:
            yield value
        elif isinstance(value, dict | list | tuple) and value:
            yield "{" if isinstance(value, dict) else "["
            stack.append(("}" if isinstance(value, dict) else "]", level, True))
            stack.append((_line(indent, level), level, True))
            items = list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]
            for i in range(len(items) - 1, -1, -1):
                key, item = items[i]
                stack.append((item, level + 1, False))
                lead = "" if key is None else json.dumps(key, ensure_ascii=False) + (":" if indent is None else ": ")
                stack.append((("," if i else "") + _line(indent, level + 1) + lead, level, True))
        else:
            yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def _line(indent: int | None, level: int) -> str:
    return "" if indent is None else "\n" + " " * min(indent * level, _MAX_INDENT)
