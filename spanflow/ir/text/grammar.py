"""The operators of the language: how each is written, and which options it takes in which order."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: The options that make up a `Sampling`, in the order in which they are written.
SAMPLING = ("max_tokens", "temperature", "top_p", "stop", "seed", "schema")


class Operator(NamedTuple):
    """An operator. It takes `text`: one text; `one`: one query; `many`: any number of queries."""

    name: str
    symbol: str
    operands: Literal["text", "one", "many"]
    options: tuple[str, ...] = ()


_ALL = (
    Operator("system", "S", "many"),
    Operator("user", "U", "many"),
    Operator("assistant", "A", "many"),
    Operator("fragment", "F", "text", ("id", "metadata")),
    Operator("seq", "✶", "many"),
    Operator("commute", "+", "many", ("rung", "anchor", "associative", "separator")),
    Operator("generate", "G", "one", ("model", *SAMPLING[:3], "n", *SAMPLING[3:], "reduce", "arity")),
    Operator("retrieve", "R", "text", ("from", "k", "rung", "anchor")),
    Operator("chat", "C", "many", SAMPLING),
)

#: Operators by their names.
OPERATORS = {operator.name: operator for operator in _ALL}
#: Operators by all that they can be written as: name, symbol, and `x` for ✶.
WRITTEN = OPERATORS | {operator.symbol: operator for operator in _ALL} | {"x": OPERATORS["seq"]}
