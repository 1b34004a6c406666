"""Answers every retrieve of a query: the only input and output before the engine, so that what follows is pure."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from numbers import Real
from typing import Any, NamedTuple

from spanflow.errors import QueryError
from spanflow.ir.nodes import Commute, Fragment, Node, Retrieve, Seq, Text
from spanflow.ir.walk import preorder, rebuild

_METHODS = ("retrieve", "invoke", "search")
_NAMES_OF_K = ("k", "top_k", "limit")
_RESULTS = "text, Fragments, pairs of text and id, documents with page_content or text, or mappings with 'text'"


class _Question(NamedTuple):
    """What a retriever is asked; equal ones are asked once."""

    retriever: int
    query: str
    k: int | None


def bind(root: Node) -> Node:
    """The same query with a commute of fragments in the place of each retrieve, wherever it stands.

    A retriever is a function of the query, which may also take `k`; or an object with `retrieve(query, k)`,
    `invoke(query)` or `search(query, k)`. It returns texts, Fragments, pairs of text and id, documents (`page_content`
    or `text`, `metadata`, `id`), or mappings with 'text'; what exceeds `k` is cut off. Nothing found leaves an empty
    seq. Equal questions are asked once. Raises QueryError, from the retriever's own error, naming path and retriever.
    """
    answers = {question: _ask(path, node) for question, (path, node) in _questions(root).items()}
    return _put(root, answers)


async def abind(root: Node) -> Node:
    """Like `bind`, with all questions asked at once: coroutines are awaited, other retrievers run in threads.

    Where one fails the others are cancelled.
    """
    questions = _questions(root)
    tasks = [asyncio.ensure_future(_ask_async(path, node)) for path, node in questions.values()]
    try:
        found = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return _put(root, dict(zip(questions, found, strict=True)))


def _questions(root: Node) -> dict[_Question, tuple[str, Retrieve]]:
    """Each different question, with the place where it is asked first."""
    found: dict[_Question, tuple[str, Retrieve]] = {}
    for path, node in preorder(root):
        if isinstance(node, Retrieve):
            found.setdefault(_question(node), (path, node))
    return found


def _question(node: Retrieve) -> _Question:
    return _Question(id(node.retriever), node.query, node.k)


def _put(root: Node, answers: Mapping[_Question, tuple[Fragment, ...]]) -> Node:
    def answered(node: Node) -> Node:
        if not isinstance(node, Retrieve):
            return node
        fragments = answers[_question(node)]
        return Commute(fragments, rung=node.rung, anchor=node.anchor) if fragments else Seq(())

    return rebuild(root, answered) if answers else root


def _ask(path: str, node: Retrieve) -> tuple[Fragment, ...]:
    call = _call(node, path, is_async=False)
    try:
        found = call()
        if inspect.isawaitable(found):
            if inspect.iscoroutine(found):
                found.close()
            raise QueryError(
                f"{path}: retriever {_name(node)} is asynchronous; bind the query with `await abind(query)`, or run it "
                "with the asynchronous methods of the session"
            )
        return _fragments(found, path, node)
    except QueryError:
        raise
    except Exception as error:
        raise _failed(path, node, error) from error


async def _ask_async(path: str, node: Retrieve) -> tuple[Fragment, ...]:
    call = _call(node, path, is_async=True)
    try:
        found = call() if _is_coroutine_function(call) else await asyncio.to_thread(call)
        if inspect.isawaitable(found):
            found = await found
        return await asyncio.to_thread(_fragments, found, path, node)
    except QueryError:
        raise
    except Exception as error:
        raise _failed(path, node, error) from error


@dataclass(frozen=True, slots=True)
class _Call:
    """A call that is ready to be made."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    named: Mapping[str, Any]

    def __call__(self) -> Any:
        return self.function(*self.arguments, **self.named)


def _is_coroutine_function(call: _Call) -> bool:
    function = call.function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _call(node: Retrieve, path: str, *, is_async: bool) -> _Call:
    function = _function(node.retriever, is_async=is_async)
    if function is None:
        raise QueryError(
            f"{path}: {_name(node)} is no retriever; a retriever is a function of the query, or an object with "
            "retrieve(query, k), invoke(query) or search(query, k)"
        )
    if node.k is None:
        return _Call(function, (node.query,), {})
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # built-in functions may not tell: what exceeds k is cut off
        return _Call(function, (node.query,), {})
    for name in _NAMES_OF_K:
        if name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY:
            return _Call(function, (node.query,), {name: node.k})
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    # A LangChain retriever hands k on to the search; other runnables hand it to functions that do not expect it.
    is_runnable = hasattr(node.retriever, "invoke") and not hasattr(node.retriever, "_get_relevant_documents")
    if takes_any and not is_runnable:
        return _Call(function, (node.query,), {"k": node.k})
    required = [p for p in parameters.values() if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, _EITHER)]
    return _Call(function, (node.query, node.k) if len(required) == 2 else (node.query,), {})


_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD


def _function(retriever: Any, *, is_async: bool) -> Callable[..., Any] | None:
    if not (inspect.isroutine(retriever) or inspect.isclass(retriever)):
        names = [name for method in _METHODS for name in ((f"a{method}", method) if is_async else (method,))]
        for name in names:
            if callable(function := getattr(retriever, name, None)):
                return function  # type: ignore[no-any-return]
    return retriever if callable(retriever) else None


def _fragments(found: Any, path: str, node: Retrieve) -> tuple[Fragment, ...]:
    if isinstance(found, str | bytes | Mapping) or not isinstance(found, Iterable):
        raise QueryError(
            f"{path}: retriever {_name(node)} returned {type(found).__name__}; it must return a list of {_RESULTS}"
        )
    return tuple(_each(islice(found, node.k), path, node))


def _each(found: Iterable[Any], path: str, node: Retrieve) -> Iterator[Fragment]:
    for number, item in enumerate(found):
        fragment = _fragment(item)
        if fragment is None:
            raise QueryError(
                f"{path}: result {number} of retriever {_name(node)} is of type {type(item).__name__}; "
                f"it must return a list of {_RESULTS}"
            )
        yield fragment


def _fragment(item: Any) -> Fragment | None:
    """A result as a fragment; None where it is none."""
    match item:
        case Fragment():
            return item
        case str():
            return Fragment(item)
        case Text(text=text):
            return Fragment(text)
        case (str(text), str() | int() | None as identity):
            return Fragment(text, _identity(identity))
        case (document, Real()):  # with the score of the search
            return _fragment(document)
        case {"text": str(text)} | {"page_content": str(text)} | {"content": str(text)}:
            metadata = item.get("metadata")
            if not isinstance(metadata, Mapping):
                skipped = ("text", "page_content", "content", "id", "metadata")
                metadata = {name: value for name, value in item.items() if name not in skipped}
            return Fragment(text, _identity(item.get("id")), metadata)
    for name in ("page_content", "text"):
        said = getattr(item, name, None)
        if isinstance(said, str):
            metadata = getattr(item, "metadata", None)
            metadata = metadata if isinstance(metadata, Mapping) else {}
            return Fragment(said, _identity(getattr(item, "id", None)), metadata)
    return None


def _identity(value: Any) -> str | None:
    return None if value is None else str(value)


def _name(node: Retrieve) -> str:
    named = getattr(node.retriever, "__qualname__", None)
    return str(named or type(node.retriever).__qualname__)


def _failed(path: str, node: Retrieve, error: Exception) -> QueryError:
    return QueryError(
        f"{path}: retriever {_name(node)} failed on the query {node.query!r}: {type(error).__name__}: {error}"
    )
