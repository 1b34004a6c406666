"""The functions that queries are written with. Each builds one frozen node and does nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from spanflow.api.coerce import (
    Operand,
    as_arguments,
    as_fidelity,
    as_node,
    as_nodes,
    as_text,
    as_whole,
    described,
)
from spanflow.api.messages import as_chat, as_message
from spanflow.api.options import Schema, as_sampling
from spanflow.errors import QueryError
from spanflow.ir.fidelity import Rung
from spanflow.ir.nodes import DEFAULT_SEPARATOR, Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Seq
from spanflow.ir.ranges import MAX_N, check_count


def system(*parts: Operand) -> Message:
    """A system message (S) of text, fragments, generated answers and joins of them. Raises QueryError."""
    return as_message("system", as_arguments(parts, "system"), "system()")


def user(*parts: Operand) -> Message:
    """A user message (U) of text, fragments, generated answers and joins of them. Raises QueryError.

    An answer inside a message is part of what is said, and no turn of its own:

    >>> from spanflow import commute, generate, user
    >>> judge = generate(user("Judge:", commute(generate("Write.", n=4)), "Which is best?"))
    """
    return as_message("user", as_arguments(parts, "user"), "user()")


def assistant(*parts: Operand) -> Message:
    """An assistant message (A) that is given, not generated. Raises QueryError."""
    return as_message("assistant", as_arguments(parts, "assistant"), "assistant()")


def fragment(text: str, id: str | None = None, metadata: Mapping[str, Any] | None = None) -> Fragment:  # noqa: A002
    """A piece of a corpus (F). `metadata` is carried along and is no part of the prompt. Raises QueryError."""
    if metadata is not None and not isinstance(metadata, Mapping):
        raise QueryError(f"fragment(): metadata: expected a dict, got {described(metadata)}")
    name = None if id is None else as_text(id, "fragment(): id")
    return Fragment(as_text(text, "fragment(): text"), name, metadata or {})


def seq(*operands: Operand) -> Seq:
    """The ordered join (✶) of its operands. Raises QueryError.

    >>> from spanflow import seq, system, user
    >>> seq(system("Be brief."), user("Why is the sky blue?")).operands[1].role
    'user'
    """
    return Seq(as_arguments(operands, "seq"))


def commute(
    *operands: Operand,
    rung: Rung | str | None = None,
    anchor: str | None = None,
    associative: bool = False,
    separator: str = DEFAULT_SEPARATOR,
) -> Commute:
    """The join (+) of operands that may stand in any order and need not see each other. Raises QueryError.

    One list, tuple or generator as the only argument gives the operands; among several arguments a list is one
    operand, whose order is kept. `rung` ('exact', 'repair(32)', 'moved') and `anchor` ('header', 'head', 'none') say
    how faithful reuse must be; None is the session's default. `associative=True` says that a judgement over the
    operands may be taken over parts of them first. `separator` follows each operand that is text inside a message.

    >>> from spanflow import commute, user
    >>> len(commute([user("first"), user("second")]).operands)
    2
    >>> commute([])
    Traceback (most recent call last):
        ...
    spanflow.errors.QueryError: commute(): there are no operands; is the list of documents or candidates empty?
    """
    alone = operands[0] if len(operands) == 1 else None
    if alone is None or isinstance(alone, Node | str):
        nodes = as_arguments(operands, "commute")
    else:
        nodes = as_nodes(alone, "commute(): argument 1")
    if not nodes:
        raise QueryError("commute(): there are no operands; is the list of documents or candidates empty?")
    if not isinstance(associative, bool):
        raise QueryError(f"commute(): associative: expected True or False, got {described(associative)}")
    rung, anchor = as_fidelity(rung, anchor, "commute")
    return Commute(nodes, rung, anchor, associative, as_text(separator, "commute(): separator"))


def generate(
    query: Operand,
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    n: int = 1,
    stop: str | Iterable[str] | None = None,
    seed: int | None = None,
    schema: Schema | None = None,
    reduce: Literal["tree"] | None = None,
    arity: int = 2,
    model: str | None = None,
) -> Generate:
    """Ask the model (G): the value is an assistant message, or `n` of them directly inside a commute.

    `max_tokens` of None is the session's default, temperature 0 is greedy, `schema` (a JSON Schema or a pydantic
    model class) makes the answer JSON of that shape. `reduce='tree'` asks to judge the candidates of an associative
    commute in a tree, `arity` at a time. Two equal generates are two samples. Raises QueryError.

    >>> from spanflow import generate, user
    >>> generate(user("A word for joy?"), max_tokens=4, stop="\\n").sampling.stop
    ('\\n',)
    """
    options = as_sampling(
        "generate", max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed, schema=schema
    )
    n, arity = as_whole(n), as_whole(arity)
    check_count(n, "generate(): n", 1, MAX_N)
    check_count(arity, "generate(): arity", 2)
    if reduce not in (None, "tree"):
        raise QueryError(f"generate(): reduce: expected 'tree' or None, got {reduce!r}")
    name = None if model is None else as_text(model, "generate(): model")
    if name == "":
        raise QueryError("generate(): model: an empty name; None means the session's model")
    return Generate(as_node(query, "generate(): query"), options, n, name, reduce, arity)


def retrieve(
    retriever: Any,
    query: str,
    k: int | None = None,
    *,
    rung: Rung | str | None = None,
    anchor: str | None = None,
) -> Retrieve:
    """Fragments from a corpus (R), fetched before the query runs and joined with +. Raises QueryError.

    `k` of None leaves the number to the retriever; `rung` and `anchor` are those of the join, as in `commute`.
    """
    if retriever is None or isinstance(retriever, str | bytes | int | float):
        raise QueryError(f"retrieve(): retriever: expected a retriever object or function, got {described(retriever)}")
    k = as_whole(k)
    if k is not None:
        check_count(k, "retrieve(): k", 1)
    rung, anchor = as_fidelity(rung, anchor, "retrieve")
    return Retrieve(retriever, as_text(query, "retrieve(): query"), k, rung, anchor)


def chat(
    messages: Iterable[Node | Mapping[str, Any] | tuple[str, Operand]],
    *,
    max_tokens: int | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    stop: str | Iterable[str] | None = None,
    seed: int | None = None,
    schema: Schema | None = None,
) -> Chat:
    """Ask the model for the next message of a chat (C): short for `generate(seq(*messages))`. Raises QueryError.

    A message is a node, a `(role, text)` pair, or a dict with 'role' and 'content'; content is text, a list of
    parts, or a list of `{"type": "text", "text": ...}`.

    >>> from spanflow import chat
    >>> chat([("user", "Hello"), {"role": "assistant", "content": "Hello!"}, ("user", "Who are you?")]).messages[1].role
    'assistant'
    """
    options = as_sampling(
        "chat", max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, seed=seed, schema=schema
    )
    return Chat(as_chat(messages, "chat(): messages"), options)
