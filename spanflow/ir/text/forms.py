"""What the text of a query is made of, before it means anything: words, strings, numbers, and groups of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Bracket: TypeAlias = Literal["(", "[", "{"]
CLOSER: dict[str, str] = {"(": ")", "[": "]", "{": "}"}


@dataclass(slots=True, eq=False)
class Form:
    """Base of all forms: its place in the source, and the comments that go with it.

    `above` are the lines before it, each a comment or empty; `behind` is a comment that follows it on its line.
    """

    start: int = field(default=0, kw_only=True)
    end: int = field(default=0, kw_only=True)
    above: list[str] = field(default_factory=list, kw_only=True)
    behind: str = field(default="", kw_only=True)


@dataclass(slots=True, eq=False)
class Word(Form):
    """A bare word: an operator, a name, or a constant."""

    text: str


@dataclass(slots=True, eq=False)
class Number(Form):
    """A number; 1 and 1.0 differ."""

    value: int | float


@dataclass(slots=True, eq=False)
class String(Form):
    """Text in quotes or in a block."""

    text: str


@dataclass(slots=True, eq=False)
class Option(Form):
    """A keyword and its value, as in `:max_tokens 64`."""

    name: str
    value: AnyForm


@dataclass(slots=True, eq=False)
class Pair(Form):
    """A key of an object and its value, as in `"page": 3`."""

    key: str
    value: AnyForm


@dataclass(slots=True, eq=False)
class Group(Form):
    """Forms between brackets; `below` are the comments after the last of them."""

    bracket: Bracket
    items: list[AnyForm] = field(default_factory=list)
    below: list[str] = field(default_factory=list)


#: Every kind of form, for `match` with assert_never.
AnyForm: TypeAlias = Word | Number | String | Option | Pair | Group


@dataclass(frozen=True, slots=True)
class Document:
    """A whole source: one form, and the comments after it."""

    form: AnyForm
    below: list[str]


def has_comments(form: Form) -> bool:
    """Whether a comment goes with this form itself."""
    return bool(form.behind) or any(form.above)
