"""Tokens to forms: brackets are matched, keywords get their values, comments find the form they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field

from spanflow.ir.limits import MAX_DEPTH, MAX_NODES
from spanflow.ir.text.forms import CLOSER, AnyForm, Bracket, Document, Form, Group, Number, Option, Pair, String, Word
from spanflow.ir.text.lexer import Token, tokens
from spanflow.ir.text.source import QuerySyntaxError, Source

#: More than any query has that was written by the printer, whose forms take three characters each.
_MAX_FORMS = 6 * MAX_NODES
_CLOSED_BY = {closer: opener for opener, closer in CLOSER.items()}


def read(source: Source) -> Document:
    """The one form of a source. Raises QuerySyntaxError."""
    source.check()
    reader = _Reader(source)
    for token in tokens(source):
        reader.take(token)
    return reader.document()


@dataclass(slots=True)
class _Open:
    """A group that is not closed yet, and what stands between its last item and the next."""

    group: Group
    option: Option | None = None
    pair: Pair | None = None
    has_colon: bool = False
    comma: Token | None = None
    above: list[str] = field(default_factory=list)


_NOTHING = Word("")


@dataclass(slots=True)
class _Reader:
    source: Source
    stack: list[_Open] = field(default_factory=list)
    root: AnyForm | None = None
    above: list[str] = field(default_factory=list)
    last: Form | None = None
    num_forms: int = 0

    def take(self, token: Token) -> None:
        """The next token."""
        match token.kind:
            case "comment":
                self._comment(token)
            case "(" | "[" | "{" as bracket:
                self._open(token, bracket)
            case ")" | "]" | "}":
                self._close(token)
            case "," | ":":
                self._separator(token)
            case "key":
                self._keyword(token)
            case "word":
                self._add(token, Word(token.value, start=token.start, end=token.end))
            case "number":
                self._add(token, Number(token.value, start=token.start, end=token.end))
            case "text":
                self._add(token, String(token.value, start=token.start, end=token.end))
            case "end":
                self._check_end(token)

    def document(self) -> Document:
        assert self.root is not None
        return Document(self.root, _trimmed(self.above))

    def _error(self, token: Token, problem: str) -> QuerySyntaxError:
        return self.source.error(token.start, token.end, problem)

    def _lines(self) -> list[str]:
        return self.stack[-1].above if self.stack else self.above

    def _comment(self, token: Token) -> None:
        if token.lines_before == 0 and self.last is not None and not self.last.behind:
            self.last.behind = token.value
            return
        lines = self._lines()
        if token.lines_before > 1:
            lines.append("")
        lines.append(token.value)

    def _open(self, token: Token, bracket: Bracket) -> None:
        if len(self.stack) >= MAX_DEPTH:
            raise self._error(token, f"brackets are nested more than {MAX_DEPTH:,} levels deep")
        if bracket == "(" and self.stack and self.stack[-1].group.bracket != "(":
            raise self._error(token, "a query cannot stand in a list or an object; these hold plain values")
        group = Group(bracket, start=token.start, end=token.end)
        self._place(token, group)
        self.stack.append(_Open(group))
        self.last = None

    def _close(self, token: Token) -> None:
        if not self.stack:
            raise self._error(token, f"there is no {_CLOSED_BY[token.kind]!r} for this {token.kind!r}")
        open_ = self.stack[-1]
        closer = CLOSER[open_.group.bracket]
        if token.kind != closer:
            where = self.source.error(open_.group.start, open_.group.end, "")
            raise self._error(
                token,
                f"expected {closer!r} for the {open_.group.bracket!r} of line {where.line}, column {where.column}, "
                f"got {token.kind!r}",
            )
        self._check_complete(open_, token)
        if open_.comma is not None:
            raise self._error(open_.comma, f"nothing stands between this comma and the {closer!r}; leave the comma out")
        open_.group.below = _trimmed(open_.above)
        open_.group.end = token.end
        self.stack.pop()
        self._finish(open_.group)

    def _check_complete(self, open_: _Open, token: Token) -> None:
        if open_.option is not None:
            raise self._error(token, f"expected a value for :{open_.option.name} before this {token.kind!r}")
        if open_.pair is not None:
            what = "a value" if open_.has_colon else "':' and a value"
            raise self._error(token, f"expected {what} for the key {_short(open_.pair.key)} before this {token.kind!r}")

    def _check_end(self, token: Token) -> None:
        if self.stack:
            group = self.stack[-1].group
            raise self.source.error(
                group.start,
                group.end,
                f"this {group.bracket!r} is never closed; expected {CLOSER[group.bracket]!r} before the end",
            )
        if self.root is None:
            raise self._error(token, 'the source is empty; expected a query, as in (generate (user "Hello"))')

    def _separator(self, token: Token) -> None:
        open_ = self.stack[-1] if self.stack else None
        if open_ is None or open_.group.bracket == "(":
            raise self._error(token, f"{token.kind!r} separates values in lists and objects; here a space does")
        if token.kind == ":":
            if open_.pair is None or open_.has_colon:
                raise self._error(token, "':' stands between a key and its value; there is no key before it")
            open_.has_colon = True
            self.last = None
            return
        self._check_complete(open_, token)
        if not open_.group.items or open_.comma is not None:
            raise self._error(token, "nothing stands before this comma; leave it out")
        open_.comma = token

    def _keyword(self, token: Token) -> None:
        if not self.stack:
            raise self._error(token, f"the option :{token.value} stands outside of a query")
        open_ = self.stack[-1]
        if open_.option is not None:
            raise self._error(token, f"expected a value for :{open_.option.name}, got the option :{token.value}")
        option = Option(token.value, _NOTHING, start=token.start, end=token.end)
        self._take_lines(token, option)
        open_.option = option
        self.last = None

    def _add(self, token: Token, form: AnyForm) -> None:
        self._place(token, form)
        self._finish(form)

    def _take_lines(self, token: Token, form: Form) -> None:
        """Comments and an empty line that stand before a form become its own."""
        lines = self._lines()
        if token.lines_before > 1:
            lines.append("")
        form.above, lines[:] = lines[:], []

    def _place(self, token: Token, form: AnyForm) -> None:
        """Put a form, whose inside may still be missing, where it stands."""
        self.num_forms += 1
        if self.num_forms > _MAX_FORMS:
            raise self._error(token, f"the source has more than {_MAX_FORMS:,} words, strings and brackets")
        if not self.stack:
            self._take_lines(token, form)
            if self.root is not None:
                raise self._error(token, "expected the end: a source holds one query; join several with (seq ...)")
            self.root = form
            return
        open_ = self.stack[-1]
        match open_.group.bracket:
            case "(":
                self._place_operand(open_, token, form)
            case "[":
                self._check_comma(open_, token)
                self._take_lines(token, form)
                open_.group.items.append(form)
            case "{":
                self._place_in_object(open_, token, form)

    def _place_operand(self, open_: _Open, token: Token, form: AnyForm) -> None:
        if open_.option is None:
            self._take_lines(token, form)
            open_.group.items.append(form)
            return
        open_.option.value = form
        _lift(open_, open_.option)
        open_.group.items.append(open_.option)

    def _place_in_object(self, open_: _Open, token: Token, form: AnyForm) -> None:
        if open_.pair is None:
            self._check_comma(open_, token)
            if not isinstance(form, String):
                raise self._error(token, 'expected a key in quotes, as in {"page": 3}')
            pair = Pair(form.text, _NOTHING, start=token.start, end=token.end)
            self._take_lines(token, pair)
            open_.pair = pair
            return
        if not open_.has_colon:
            raise self._error(token, f"expected ':' after the key {_short(open_.pair.key)}")
        open_.pair.value = form
        _lift(open_, open_.pair)
        open_.group.items.append(open_.pair)

    def _check_comma(self, open_: _Open, token: Token) -> None:
        if open_.group.items and open_.comma is None:
            raise self._error(token, f"expected ',' or {CLOSER[open_.group.bracket]!r}")
        open_.comma = None

    def _finish(self, form: AnyForm) -> None:
        """A form is complete; so is the option or the pair that it is the value of."""
        self.last = form
        if not self.stack:
            return
        open_ = self.stack[-1]
        if open_.option is not None and open_.option.value is form:
            open_.option.end = form.end
            self.last, open_.option = open_.option, None
        elif open_.pair is not None:
            self.last = None
            if open_.has_colon:
                open_.pair.end = form.end
                self.last, open_.pair, open_.has_colon = open_.pair, None, False


def _lift(open_: _Open, form: Option | Pair) -> None:
    """Comments between a key and its value stand above both."""
    form.above += filter(None, open_.above)
    open_.above.clear()


def _trimmed(lines: list[str]) -> list[str]:
    return lines[1:] if lines and not lines[0] else lines


def _short(key: str) -> str:
    return repr(key if len(key) <= 40 else f"{key[:39]}…")
