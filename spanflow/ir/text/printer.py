"""Nodes to forms: a tree becomes the text that says it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, assert_never

from spanflow.ir.data import checked_metadata
from spanflow.ir.nodes import (
    DEFAULT_SEPARATOR,
    Chat,
    Commute,
    Fragment,
    Generate,
    Message,
    Node,
    Query,
    Retrieve,
    Sampling,
    Seq,
    Text,
)
from spanflow.ir.text.forms import AnyForm, Document, Group, Option, String, Word
from spanflow.ir.text.grammar import OPERATORS
from spanflow.ir.text.layout import layout
from spanflow.ir.text.options import option_form
from spanflow.ir.writing import RetrieverNames, check_length, write

_NAME = re.compile(r"[A-Za-z_][\w.-]*", re.ASCII)


def to_text(node: Node, *, width: int = 100, retrievers: Mapping[str, Any] | None = None) -> str:
    """The text of a query, which `from_text` reads back as an equal one. Equal queries have equal texts.

    Lines have `width` characters where strings allow it. `retrievers` names the retrievers; without it they are
    called by the name of their function or class, and `from_text` has to be given them under these names. Raises
    QueryError where `verify` does, for metadata that JSON cannot say, and for retrievers without a name.

    >>> from spanflow import commute, generate, seq, system, user
    >>> from spanflow.ir.text import to_text
    >>> query = generate(seq(system("Be brief."), commute("One.", "Two.", rung="moved"), user("Why?")), max_tokens=8)
    >>> print(to_text(query, width=60))
    (generate :max_tokens 8
      (seq
        (system "Be brief.")
        (commute :rung moved "One." "Two.")
        (user "Why?")))
    """
    names = RetrieverNames(retrievers)

    def form(node: Node, below: list[AnyForm]) -> AnyForm:
        return _form(node, below, names)

    return check_length(layout(Document(write(node, form), []), width))


def _form(node: Node, below: list[AnyForm], names: RetrieverNames) -> AnyForm:
    query: Query = node  # type: ignore[assignment]
    match query:
        case Text(text=text):
            return String(text)
        case Fragment(text=text):
            metadata = checked_metadata(query.metadata, "fragment: metadata")
            return _call("fragment", {"id": query.id, "metadata": metadata or None}, [String(text)])
        case Message(role=role):
            return _call(role, {}, below)
        case Seq():
            return _call("seq", {}, below)
        case Commute():
            return _call("commute", _fidelity(query) | _commute_options(query), below)
        case Generate():
            return _call("generate", _generate_options(query) | _sampling_options(query.sampling), below)
        case Retrieve(query=text):
            options = {"from": _Name(names.name(query.retriever)), "k": query.k}
            return _call("retrieve", options | _fidelity(query), [String(text)])
        case Chat():
            return _call("chat", _sampling_options(query.sampling), below)
        case _:
            assert_never(query)


class _Name(str):
    """A name rather than text."""


def _call(operator: str, values: dict[str, Any], operands: list[AnyForm]) -> Group:
    given = [name for name in OPERATORS[operator].options if values.get(name) is not None]
    return Group("(", [Word(operator), *(_option(name, values[name]) for name in given), *operands])


def _option(name: str, value: Any) -> Option:
    if isinstance(value, _Name):
        return Option(name, Word(value) if _NAME.fullmatch(value) else String(value))
    return option_form(name, value)


def _fidelity(node: Commute | Retrieve) -> dict[str, Any]:
    return {"rung": node.rung, "anchor": node.anchor}


def _commute_options(node: Commute) -> dict[str, Any]:
    return {
        "associative": node.associative or None,
        "separator": None if node.separator == DEFAULT_SEPARATOR else node.separator,
    }


def _generate_options(node: Generate) -> dict[str, Any]:
    return {
        "model": node.model,
        "n": None if node.n == 1 else node.n,
        "reduce": node.reduce,
        "arity": None if node.arity == 2 else node.arity,
    }


def _sampling_options(sampling: Sampling) -> dict[str, Any]:
    changed = [field for field in fields(Sampling) if getattr(sampling, field.name) != field.default]
    return {field.name: getattr(sampling, field.name) for field in changed}
