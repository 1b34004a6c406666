"""A query's text in the form that the printer would give it, with its comments."""

from __future__ import annotations

from spanflow.errors import QueryError
from spanflow.ir.text.forms import AnyForm, Document, Group, Option, Word
from spanflow.ir.text.grammar import WRITTEN
from spanflow.ir.text.layout import layout
from spanflow.ir.text.parser import build
from spanflow.ir.text.reader import read
from spanflow.ir.text.source import Source


def format_text(source: str, *, width: int = 100, filename: str = "<query>") -> str:
    """The same query laid out as `to_text` would, and ended by a line end: comments stay, nothing else changes.

    Operators are called by their names, options stand before operands and in one order, strings are quoted in one
    way. Formatting twice changes nothing more. Raises QuerySyntaxError for what is no query; retrievers may have any
    name.

    >>> from spanflow.ir.text import format_text
    >>> print(format_text('(G (U "Why?") ; the question\\n :n 2)'), end="")
    (generate :n 2
      (user "Why?") ; the question
    )
    """
    if not isinstance(source, str):
        raise QueryError(f"{filename}: the source must be text, got {type(source).__name__}; decode it first")
    page = Source(source, filename)
    document = read(page)
    build(document, page, lambda _: _any_retriever)
    _settle(document)
    return layout(document, width) + "\n"


def _any_retriever(query: str) -> list[str]:
    return []


def _settle(document: Document) -> None:
    """Names for symbols, and options in their order."""
    stack: list[AnyForm] = [document.form]
    while stack:
        form = stack.pop()
        if not isinstance(form, Group) or form.bracket != "(":
            continue
        head = form.items[0]
        assert isinstance(head, Word)
        operator = WRITTEN[head.text]
        head.text = operator.name
        options = [item for item in form.items if isinstance(item, Option)]
        operands = [item for item in form.items[1:] if not isinstance(item, Option)]
        for option in options:
            option.above = [line for line in option.above if line]
        options.sort(key=lambda option: operator.options.index(option.name))
        form.items = [head, *options, *operands]
        stack.extend(operands)
