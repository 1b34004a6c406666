"""The JSON form to nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, assert_never

from spanflow.errors import QueryError
from spanflow.ir.data import check_data, schema_text
from spanflow.ir.fidelity import Rung, as_rung
from spanflow.ir.json.decode import loaded
from spanflow.ir.json.issues import validated
from spanflow.ir.json.model import (
    MODELS,
    VERSION,
    ChatModel,
    CommuteModel,
    FragmentModel,
    GenerateModel,
    MessageModel,
    NodeModel,
    QueryModel,
    RetrieveModel,
    SampledModel,
    SeqModel,
)
from spanflow.ir.json.path import ROOT, Place, described, within
from spanflow.ir.json.spnl_parts import KEYS as SPNL_KEYS
from spanflow.ir.json.spnl_parts import is_spnl_key
from spanflow.ir.json.spnl_read import from_spnl
from spanflow.ir.limits import MAX_DEPTH, MAX_NODES
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Sampling, Seq, Text
from spanflow.ir.ranges import check_text
from spanflow.ir.reading import did_you_mean, find_retriever
from spanflow.ir.verify import verify


def from_json(data: Mapping[str, Any] | str | bytes, *, retrievers: Mapping[str, Any] | None = None) -> Node:
    """The query that JSON says, from text or from the values it stands for; one that `verify` accepts.

    Reads the form that `to_json` writes, `{"spanflow": 1, "query": ...}`, and the forms of spnl (see `from_spnl`).
    `retrievers` are those that a `from` may name. Raises QueryError that begins with a path, as in
    `$.query.operands[2]`.

    >>> from spanflow.ir.json import from_json
    >>> from_json('{"spanflow": 1, "query": {"type": "user", "parts": ["Why?"]}}').role
    'user'
    """
    value = loaded(data)
    if "spanflow" not in value:
        if any(is_spnl_key(key) for key in value):
            return from_spnl(value, retrievers=retrievers)
        raise QueryError(
            '$: expected {"spanflow": 1, "query": ...}, or a query of spnl, which is an object with one key: '
            f"{', '.join(sorted(SPNL_KEYS))}"
        )
    if value["spanflow"] != VERSION or isinstance(value["spanflow"], bool):
        raise QueryError(
            f"$.spanflow: this version reads version {VERSION} of the JSON form, got {described(value['spanflow'])}"
        )
    validated(QueryModel, value, ROOT)
    node = _read(value["query"], ROOT.at("query"), retrievers)
    try:
        verify(node)
    except QueryError as error:
        raise QueryError(f"$.query{str(error).removeprefix('$')}") from None
    return node


def _read(root: Any, place: Place, retrievers: Mapping[str, Any] | None) -> Node:
    nodes: list[Node] = []
    num_nodes = 0
    stack: list[tuple[Any, Place, int, NodeModel | None]] = [(root, place, 1, None)]
    while stack:
        value, here, depth, model = stack.pop()
        if model is not None:
            first = len(nodes) - len(_below(model))
            nodes[first:] = [_node(model, nodes[first:], here, retrievers)]
            continue
        num_nodes += 1
        if num_nodes > MAX_NODES or depth > MAX_DEPTH:
            raise QueryError(
                f"{here}: the query has more than {MAX_NODES:,} nodes or {MAX_DEPTH:,} levels; does a list contain "
                "itself?"
            )
        if isinstance(value, str):
            with within(here):
                check_text(value, "")
            nodes.append(Text(value))
            continue
        model = _model(value, here)
        stack.append((value, here, depth, model))
        below = _below(model)
        stack.extend((below[i][1], here.at(*below[i][0]), depth + 1, None) for i in range(len(below) - 1, -1, -1))
    return nodes[0]


def _model(value: Any, place: Place) -> NodeModel:
    if not isinstance(value, dict):
        raise QueryError(f"{place}: expected a node, which is text or an object with a type, got {described(value)}")
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in MODELS:
        known = ", ".join(MODELS)
        if kind is None:
            raise QueryError(f"{place}: 'type' is missing; types are {known}")
        guess = did_you_mean(kind, MODELS) if isinstance(kind, str) else ""
        raise QueryError(f"{place}.type: {described(kind)} is no type of a node{guess or f'; types are {known}'}")
    return validated(MODELS[kind], value, place)


def _below(model: NodeModel) -> list[tuple[tuple[str | int, ...], Any]]:
    """The children that are still to be read, with their places."""
    match model:
        case FragmentModel() | RetrieveModel():
            return []
        case MessageModel(parts=parts):
            return [(("parts", i), part) for i, part in enumerate(parts)]
        case SeqModel(operands=operands) | CommuteModel(operands=operands):
            return [(("operands", i), operand) for i, operand in enumerate(operands)]
        case GenerateModel(query=query):
            return [(("query",), query)]
        case ChatModel(messages=messages):
            return [(("messages", i), message) for i, message in enumerate(messages)]
        case _:
            assert_never(model)


def _node(model: NodeModel, below: list[Node], place: Place, retrievers: Mapping[str, Any] | None) -> Node:
    match model:
        case FragmentModel():
            with within(place.at("metadata")):
                check_data(model.metadata, "")
            return Fragment(model.text, model.id, model.metadata)
        case MessageModel():
            return Message(model.type, tuple(below))
        case SeqModel():
            return Seq(tuple(below))
        case CommuteModel():
            rung = _rung(model.rung, place)
            return Commute(tuple(below), rung, model.anchor, model.associative, model.separator)
        case GenerateModel():
            return Generate(below[0], _sampling(model, place), model.n, model.model, model.reduce, model.arity)
        case RetrieveModel():
            try:
                retriever = find_retriever(model.from_, retrievers)
            except QueryError as error:
                raise QueryError(f"{place.at('from')}: {error}") from None
            return Retrieve(retriever, model.query, model.k, _rung(model.rung, place), model.anchor)
        case ChatModel():
            return Chat(tuple(below), _sampling(model, place))
        case _:
            assert_never(model)


def _rung(text: str | None, place: Place) -> Rung | None:
    with within(place.at("rung")):
        return None if text is None else as_rung(text, "")


def _sampling(model: SampledModel, place: Place) -> Sampling:
    schema = model.schema_
    if isinstance(schema, dict | bool):
        with within(place.at("schema")):
            check_data(schema, "")
        schema = schema_text(schema)
    elif schema is not None and not isinstance(schema, str):
        raise QueryError(f"{place}.schema: expected a JSON Schema as an object, or its text, got {described(schema)}")
    return Sampling(model.max_tokens, model.temperature, model.top_p, tuple(model.stop), model.seed, schema)
