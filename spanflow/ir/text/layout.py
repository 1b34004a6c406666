"""Forms to text: on one line where that is wide enough, and each on its own line where it is not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, assert_never

from spanflow.ir.text.forms import (
    CLOSER,
    AnyForm,
    Document,
    Group,
    Number,
    Option,
    Pair,
    String,
    Word,
    has_comments,
)
from spanflow.ir.text.strings import QUOTES, block_lines, is_block, quoted

_INDENT = 2
_MAX_INDENT = 60
_MIN_WIDTH = 24


def layout(document: Document, width: int) -> str:
    """The text of a document, without an end of line at its end. Lines have `width` characters where that can be.

    Nothing is indented by more than half of the width or sixty characters, however deep it stands. The forms are
    changed: comments move to where they can be printed.
    """
    flat = _measure(document.form)
    width = max(width, _MIN_WIDTH)
    page = _Page(width)
    stack: list[_Step] = [*_lines(document.form.above, 0, is_first=True)]
    stack += [_NewLine(), _Put(document.form, 0, 0), *_behind(document.form)]
    stack += _lines(document.below, 0, is_first=False)
    stack.reverse()
    while stack:
        step = stack.pop()
        match step:
            case str():
                page.write(step)
            case _NewLine():
                page.break_line(step.indent)
            case _Put():
                size = flat.get(id(step.form))
                if size is not None and page.column + size + step.tail <= width:
                    page.write(_on_one_line(step.form))
                else:
                    stack += reversed(_broken(step, flat, page))
            case _:
                assert_never(step)
    return "".join(page.pieces).strip("\n")


class _NewLine(NamedTuple):
    indent: int = 0


class _Put(NamedTuple):
    """Print a form; lines after its first begin at `indent`, and `tail` characters follow on its last."""

    form: AnyForm
    indent: int
    tail: int


_Step: TypeAlias = str | _NewLine | _Put


@dataclass(slots=True)
class _Page:
    width: int
    column: int = 0
    indent: int = 0
    pieces: list[str] = field(default_factory=list)

    def write(self, text: str) -> None:
        """Text without an end of line."""
        if text and self.indent:
            self.pieces.append(" " * self.indent)
            self.indent = 0
        self.pieces.append(text)
        self.column += len(text)

    def break_line(self, indent: int) -> None:
        """Begin a line; one on which nothing is written stays empty."""
        self.pieces.append("\n")
        self.column = self.indent = indent

    def below(self, indent: int) -> int:
        """Where what stands inside begins."""
        return min(indent + _INDENT, self.width // 2, _MAX_INDENT)


def _measure(root: AnyForm) -> dict[int, int]:
    """The width of each form on one line, by its id; absent where it cannot stand on one line."""
    flat: dict[int, int] = {}
    stack: list[tuple[AnyForm, bool]] = [(root, False)]
    if isinstance(root, String) and is_block(root.text):
        return flat
    while stack:
        form, done = stack.pop()
        below = _children(form)
        if not done and below:
            stack.append((form, True))
            stack.extend((child, False) for child in below)
            continue
        if isinstance(form, Group | Option | Pair):
            _settle(form)
        if (size := _size(form, flat)) is not None:
            flat[id(form)] = size
        if isinstance(form, Group) and form.bracket == "(":
            for item in form.items:
                if isinstance(item, String) and is_block(item.text):
                    flat.pop(id(item), None)
                    flat.pop(id(form), None)
    return flat


def _children(form: AnyForm) -> list[AnyForm]:
    match form:
        case Group(items=items):
            return items
        case Option(value=value) | Pair(value=value):
            return [value]
        case _:
            return []


def _settle(form: Group | Option | Pair) -> None:
    """Comments before an operator, or between a key and its value, go above the whole."""
    match form:
        case Group(bracket="(", items=[head, *_]):
            form.above += filter(None, head.above)
            head.above = []
        case Option(value=value) | Pair(value=value):
            form.above += filter(None, value.above)
            value.above = []
        case _:
            pass


def _size(form: AnyForm, flat: dict[int, int]) -> int | None:
    match form:
        case Word() | Number() | String():
            return len(_atom(form))
        case Option(value=value):
            return _sum([len(form.name) + 2, flat.get(id(value))])
        case Pair(value=value):
            return _sum([len(quoted(form.key)) + 2, flat.get(id(value))])
        case Group():
            if form.below or any(has_comments(item) for item in form.items):
                return None
            between = (1 if form.bracket == "(" else 2) * max(0, len(form.items) - 1)
            return _sum([2 + between, *(flat.get(id(item)) for item in form.items)])
        case _:
            assert_never(form)


def _sum(sizes: list[int | None]) -> int | None:
    return None if None in sizes else sum(size for size in sizes if size is not None)


def _atom(form: Word | Number | String) -> str:
    match form:
        case Word(text=text):
            return text
        case Number(value=value):
            return repr(value)
        case String(text=text):
            return quoted(text)
        case _:
            assert_never(form)


def _on_one_line(root: AnyForm) -> str:
    pieces: list[str] = []
    stack: list[AnyForm | str] = [root]
    while stack:
        form = stack.pop()
        match form:
            case str():
                pieces.append(form)
            case Option(name=name, value=value):
                pieces.append(f":{name} ")
                stack.append(value)
            case Pair(key=key, value=value):
                pieces.append(f"{quoted(key)}: ")
                stack.append(value)
            case Group():
                pieces.append(form.bracket)
                stack.append(CLOSER[form.bracket])
                between = " " if form.bracket == "(" else ", "
                for i in range(len(form.items) - 1, -1, -1):
                    stack.append(form.items[i])
                    if i:
                        stack.append(between)
            case _:
                pieces.append(_atom(form))
    return "".join(pieces)


def _broken(put: _Put, flat: dict[int, int], page: _Page) -> list[_Step]:
    form = put.form
    match form:
        case String(text=text) if id(form) not in flat:
            steps: list[_Step] = [QUOTES]
            for line in block_lines(text):
                steps += [_NewLine(put.indent), line]
            return [*steps, _NewLine(put.indent), QUOTES]
        case Word() | Number() | String():
            return [_atom(form)]
        case Option(name=name, value=value):
            return [f":{name} ", _Put(value, put.indent, put.tail)]
        case Pair(key=key, value=value):
            return [f"{quoted(key)}: ", _Put(value, put.indent, put.tail)]
        case Group(bracket="("):
            return _call(form, put, flat, page)
        case Group():
            return _data(form, put, page)
        case _:
            assert_never(form)


def _data(group: Group, put: _Put, page: _Page) -> list[_Step]:
    """A list or an object, one item a line."""
    inner = page.below(put.indent)
    steps: list[_Step] = [group.bracket]
    for i, item in enumerate(group.items):
        comma = "," if i < len(group.items) - 1 else ""
        steps += _lines(item.above, inner, is_first=i == 0)
        steps += [_NewLine(inner), _Put(item, inner, 1), comma, *_behind(item)]
    steps += _lines(group.below, inner, is_first=not group.items)
    return [*steps, _NewLine(put.indent), CLOSER[group.bracket]]


def _call(group: Group, put: _Put, flat: dict[int, int], page: _Page) -> list[_Step]:
    """An operator: its options beside it where all of them fit, its operands below it."""
    head, *rest = group.items
    options: list[AnyForm] = [item for item in rest if isinstance(item, Option)]
    others: list[AnyForm] = [item for item in rest if not isinstance(item, Option)]
    steps: list[_Step] = [f"{group.bracket}", _Put(head, put.indent, 0), *_behind(head)]
    sizes = [flat.get(id(option)) for option in options]
    used = _sum([page.column + 1, flat.get(id(head)), len(sizes), *sizes, 0 if others else put.tail + 1])
    if used is not None and used <= page.width and not any(map(has_comments, [head, *options])):
        steps += [f" {_on_one_line(option)}" for option in options]
    else:
        others = options + others
    inner = page.below(put.indent)
    last: AnyForm = others[-1] if others else head
    ends_in_comment = bool(last.behind or group.below)
    for i, item in enumerate(others):
        tail = put.tail + 1 if item is last and not ends_in_comment else 0
        steps += _lines(item.above, inner, is_first=i == 0)
        steps += [_NewLine(inner), _Put(item, inner, tail), *_behind(item)]
    steps += _lines(group.below, inner, is_first=not others)
    return [*steps, *([_NewLine(put.indent)] if ends_in_comment else []), CLOSER[group.bracket]]


def _lines(lines: list[str], indent: int, *, is_first: bool) -> list[_Step]:
    """Comments on lines of their own, with the empty lines among them, but for one that would come first."""
    if is_first and lines and not lines[0]:
        lines = lines[1:]
    return [step for line in lines for step in (_NewLine(indent), line)]


def _behind(form: AnyForm) -> list[_Step]:
    return [f" {form.behind}"] if form.behind else []
