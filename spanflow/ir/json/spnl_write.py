"""Nodes to the forms of spnl, IBM's implementation of span queries, as far as these can say them."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias, assert_never

from spanflow.errors import QueryError
from spanflow.ir.json.spnl_model import DEFAULT_TEMPERATURE, MAX_TOKENS
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
from spanflow.ir.writing import write


class _Words(NamedTuple):
    """Text that is no message yet."""

    text: str


class _Nothing(NamedTuple):
    """An empty seq: it says nothing, inside of a message and outside."""


#: What becomes of a node: an object of spnl's, text, or nothing.
_Written: TypeAlias = "dict[str, Any] | _Words | _Nothing"


def to_spnl(node: Node, *, model: str | None = None) -> dict[str, Any]:
    """The query as a value of spnl's JSON. Read by `from_spnl` it has the same meaning: empty seqs are gone, the
    texts of a message are one, and a chat is a generate.

    `model` is named where a generate names none, since spnl has no default. Raises QueryError with path and reason
    for what spnl cannot say: fragments, retrieves, joins inside messages, rungs, anchors, separators, samples drawn by
    anything but temperature, stops, seeds, schemas, and trees of judges.

    >>> from spanflow import commute, generate, seq, system, user
    >>> from spanflow.ir.json import to_spnl
    >>> judge = seq(system("Pick one."), commute(generate(user("A name?"), temperature=0.6, n=4)))
    >>> to_spnl(judge, model="m")["cross"][1]
    {'plus': [{'repeat': {'n': 4, 'g': {'model': 'm', 'input': {'user': 'A name?'}}}}]}
    """

    def build(node: Node, below: list[_Written]) -> _Written:
        return _written(node, below, model)

    written = write(node, build)
    try:
        return _object(written)
    except QueryError as error:
        raise QueryError(f"$: {error}") from None


def _written(node: Node, below: list[_Written], model: str | None) -> _Written:
    query: Query = node  # type: ignore[assignment]
    match query:
        case Text(text=text):
            return _Words(text)
        case Fragment():
            raise QueryError("fragment: spnl has no fragments; put the text into a message of its own")
        case Message(role=role):
            return {role: "".join(_words(part) for part in below)}
        case Seq():
            return _seq(below)
        case Commute():
            _check_commute(query)
            if any(isinstance(operand, _Words) for operand in below):
                raise QueryError("commute: spnl joins messages, not texts; put each text into a message of its own")
            return _join("plus", below)
        case Generate():
            body = _body(query.sampling, query.model or model, below[0], "generate")
            if query.reduce is not None or query.arity != 2:
                raise QueryError("generate: spnl has no trees of judges (reduce, arity)")
            return {"repeat": {"n": query.n, "g": body}} if query.n > 1 else {"g": body}
        case Retrieve():
            raise QueryError("retrieve: spnl embeds documents itself; bind() the query first, and write what it finds")
        case Chat():
            return {"g": _body(query.sampling, model, _seq(below), "chat")}
        case _:
            assert_never(query)


def _words(part: _Written) -> str:
    match part:
        case _Words(text=text):
            return text
        case _Nothing():
            return ""
        case _:
            raise QueryError("message: spnl's messages hold plain text, and neither joins nor answers")


def _seq(below: list[_Written]) -> _Written:
    said: list[_Written] = [operand for operand in below if not isinstance(operand, _Nothing)]
    words = [operand.text for operand in said if isinstance(operand, _Words)]
    if said and len(words) == len(said):
        return _Words("".join(words))
    return _join("cross", said)


def _join(key: str, below: list[_Written]) -> _Written:
    operands = [_object(operand) for operand in below if not isinstance(operand, _Nothing)]
    return {key: operands} if operands else _Nothing()


def _object(written: _Written) -> dict[str, Any]:
    match written:
        case _Words():
            raise QueryError("there is text outside of a message, and spnl has messages only; put it into user(...)")
        case _Nothing():
            raise QueryError("an empty seq says nothing that spnl could say")
        case _:
            return written


def _check_commute(node: Commute) -> None:
    for name, default in (("rung", None), ("anchor", None), ("associative", False), ("separator", DEFAULT_SEPARATOR)):
        if getattr(node, name) != default:
            raise QueryError(f"commute: spnl cannot say {name}={getattr(node, name)!s}; leave it to the session")


def _body(sampling: Sampling, model: str | None, query: _Written, where: str) -> dict[str, Any]:
    if not model:
        raise QueryError(f"{where}: spnl has no default model; name one, as in to_spnl(query, model='...')")
    for name, default in (("top_p", 1.0), ("stop", ()), ("seed", None), ("schema", None)):
        if getattr(sampling, name) != default:
            raise QueryError(f"{where}: spnl cannot say {name}")
    body: dict[str, Any] = {"model": model, "input": _object(query)}
    if sampling.max_tokens is not None:
        if sampling.max_tokens > MAX_TOKENS:
            raise QueryError(f"{where}: max_tokens is {sampling.max_tokens:,}, and at most {MAX_TOKENS:,} in spnl")
        body["max_tokens"] = sampling.max_tokens
    if sampling.temperature != DEFAULT_TEMPERATURE:
        body["temperature"] = sampling.temperature
    return body
