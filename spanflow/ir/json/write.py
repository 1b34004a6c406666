"""Nodes to the JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, assert_never

from spanflow.ir.data import checked_metadata, schema_data
from spanflow.ir.json.decode import encode
from spanflow.ir.json.model import VERSION
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
from spanflow.ir.writing import RetrieverNames, check_length, write


def to_json(node: Node, *, retrievers: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The JSON form of a query, which `from_json` reads back as an equal one. Equal queries have equal forms.

    What has its default is left out; `json_schema` describes the rest. `retrievers` names the retrievers, as in
    `to_text`. Raises QueryError where `verify` does, for metadata that JSON cannot say, and for retrievers without a
    name. `json.dumps` writes forms of a few hundred levels, `to_json_text` all.

    >>> from spanflow import user
    >>> from spanflow.ir.json import to_json
    >>> to_json(user("Why?"))
    {'spanflow': 1, 'query': {'type': 'user', 'parts': ['Why?']}}
    """
    names = RetrieverNames(retrievers)

    def build(node: Node, below: list[Any]) -> Any:
        return _value(node, below, names)

    return {"spanflow": VERSION, "query": write(node, build)}


def to_json_text(node: Node, *, retrievers: Mapping[str, Any] | None = None, indent: int | None = None) -> str:
    """The text of `to_json`, however deep the query is; on one line, or indented by `indent` a level."""
    return check_length(encode(to_json(node, retrievers=retrievers), indent))


def _value(node: Node, below: list[Any], names: RetrieverNames) -> Any:
    query: Query = node  # type: ignore[assignment]
    match query:
        case Text(text=text):
            return str(text)
        case Fragment():
            metadata = checked_metadata(query.metadata, "fragment: metadata")
            return _object("fragment", {"text": query.text, "id": query.id, "metadata": metadata or None})
        case Message(role=role):
            return _object(role, {"parts": below})
        case Seq():
            return _object("seq", {"operands": below})
        case Commute():
            options: dict[str, Any] = {
                "associative": query.associative or None,
                "separator": None if query.separator == DEFAULT_SEPARATOR else query.separator,
            }
            return _object("commute", {"operands": below} | _fidelity(query) | options)
        case Generate():
            options = {
                "n": None if query.n == 1 else query.n,
                "model": query.model,
                "reduce": query.reduce,
                "arity": None if query.arity == 2 else query.arity,
            }
            return _object("generate", {"query": below[0]} | _sampling(query.sampling) | options)
        case Retrieve():
            values = {"from": names.name(query.retriever), "query": query.query, "k": query.k}
            return _object("retrieve", values | _fidelity(query))
        case Chat():
            return _object("chat", {"messages": below} | _sampling(query.sampling))
        case _:
            assert_never(query)


def _object(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind} | {key: value for key, value in values.items() if value is not None}


def _fidelity(node: Commute | Retrieve) -> dict[str, Any]:
    return {"rung": None if node.rung is None else str(node.rung), "anchor": node.anchor}


def _sampling(sampling: Sampling) -> dict[str, Any]:
    changed = [field.name for field in fields(Sampling) if getattr(sampling, field.name) != field.default]
    values = {name: getattr(sampling, name) for name in changed}
    if "stop" in values:
        values["stop"] = list(sampling.stop)
    if sampling.schema is not None:
        data = schema_data(sampling.schema)
        values["schema"] = sampling.schema if data is None else data
    return values
