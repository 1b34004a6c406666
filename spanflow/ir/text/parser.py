"""Forms to nodes: what is written becomes a tree, or an error that shows where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from spanflow.errors import QueryError
from spanflow.ir.limits import MAX_NODES
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Role, Sampling, Seq, Text
from spanflow.ir.reading import did_you_mean, find_retriever, split_path
from spanflow.ir.text.forms import AnyForm, Document, Form, Group, Option, String, Word
from spanflow.ir.text.grammar import SAMPLING, WRITTEN, Operator
from spanflow.ir.text.options import described, read_name, read_option
from spanflow.ir.text.reader import read
from spanflow.ir.text.source import Source
from spanflow.ir.verify import verify

_ROLES: dict[str, Role] = {"system": "system", "user": "user", "assistant": "assistant"}


def from_text(source: str, *, filename: str = "<query>", retrievers: Mapping[str, Any] | None = None) -> Node:
    """The query that a text says; one that `verify` accepts.

    `filename` is named in errors, `retrievers` are those that `:from` may name. Raises QuerySyntaxError, which
    shows the place.

    >>> from spanflow.ir.text import from_text
    >>> from_text('(generate :max_tokens 8 (user "Why?"))').sampling.max_tokens
    8
    """
    if not isinstance(source, str):
        raise QueryError(f"{filename}: the source must be text, got {type(source).__name__}; decode it first")
    page = Source(source, filename)
    return build(read(page), page, lambda name: find_retriever(name, retrievers))


def build(document: Document, source: Source, lookup: Callable[[str], Any]) -> Node:
    """The tree of a document; `lookup` finds retrievers by name or raises QueryError. Raises QuerySyntaxError."""
    node = _build(document.form, source, lookup)
    try:
        verify(node)
    except QueryError as error:
        steps, problem = split_path(str(error))
        form: AnyForm = document.form
        for step in steps:
            assert isinstance(form, Group)
            form = operands(form)[step]
        raise _error(source, form, problem) from None
    return node


def operands(group: Group) -> list[AnyForm]:
    """What stands after the operator and is no option."""
    return [item for item in group.items[1:] if not isinstance(item, Option)]


class _Call(NamedTuple):
    """An operator with its options and operands, as read."""

    operator: Operator
    options: dict[str, Any]
    operands: list[AnyForm]


def _build(root: AnyForm, source: Source, lookup: Callable[[str], Any]) -> Node:
    nodes: list[Node] = []
    num_nodes = 0
    stack: list[tuple[AnyForm, _Call | None]] = [(root, None)]
    while stack:
        form, call = stack.pop()
        if call is not None:
            first = len(nodes) - len(call.operands)
            nodes[first:] = [_join(call, nodes[first:])]
            continue
        num_nodes += 1
        if num_nodes > MAX_NODES:
            raise _error(source, form, f"the query has more than {MAX_NODES:,} nodes; split it")
        if isinstance(form, String):
            nodes.append(Text(form.text))
            continue
        call = _call(form, source, lookup)
        if call.operator.operands == "text":
            nodes.append(_leaf(call))
        else:
            stack.append((form, call))
            stack.extend((operand, None) for operand in reversed(call.operands))
    return nodes[0]


def _error(source: Source, form: Form, problem: str) -> QueryError:
    """The error at a form; of a group only the beginning is marked."""
    end = form.end
    if isinstance(form, Group) and form.bracket == "(" and form.items:
        end = form.items[0].end
    return source.error(form.start, end, problem)


def _call(form: AnyForm, source: Source, lookup: Callable[[str], Any]) -> _Call:
    if isinstance(form, Word):
        raise _error(source, form, f'expected text in quotes or a query; write "{form.text[:40]}" if it is text')
    if not isinstance(form, Group) or form.bracket != "(":
        raise _error(source, form, f"expected text in quotes or a query in parentheses, got {described(form)}")
    operator = _operator(form, source)
    call = _Call(operator, _options(operator, form, source, lookup), operands(form))
    _check_operands(call, form, source)
    return call


def _operator(group: Group, source: Source) -> Operator:
    known = ", ".join(name for name in WRITTEN if name.isalpha() and len(name) > 1)
    if not group.items:
        raise _error(source, group, f"expected an operator after '('; operators are {known}")
    head = group.items[0]
    if not isinstance(head, Word):
        raise _error(source, head, f"expected an operator after '(', got {described(head)}; operators are {known}")
    if head.text not in WRITTEN:
        guess = did_you_mean(head.text, WRITTEN)
        raise _error(source, head, f"{described(head)} is no operator{guess or f'; operators are {known}'}")
    return WRITTEN[head.text]


def _options(operator: Operator, group: Group, source: Source, lookup: Callable[[str], Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for option in group.items:
        if not isinstance(option, Option):
            continue
        key_end = option.start + len(option.name) + 1
        if option.name not in operator.options:
            known = "; it takes none"
            if operator.options:
                known = did_you_mean(option.name, operator.options)
                known = known or f"; it takes {', '.join(':' + name for name in operator.options)}"
            raise source.error(option.start, key_end, f"{operator.name} has no option :{option.name}{known}")
        if option.name in values:
            raise source.error(option.start, key_end, f"{operator.name} has the option :{option.name} twice")
        if option.name != "from":
            values[option.name] = read_option(option, source)
            continue
        name = read_name(option, source)
        try:
            values["from"] = lookup(name)
        except QueryError as error:
            raise _error(source, option.value, str(error)) from None
    return values


def _check_operands(call: _Call, group: Group, source: Source) -> None:
    operator, found = call.operator, call.operands
    if operator.operands == "many":
        return
    what = "query or text" if operator.operands == "one" else "text in quotes"
    if not found:
        raise _error(source, group, f"{operator.name} expects one {what}, got none")
    if operator.operands == "text" and not isinstance(found[0], String):
        raise _error(source, found[0], f"{operator.name} expects one {what}, got {described(found[0])}")
    if len(found) > 1:
        hint = "; join several with (seq ...)" if operator.operands == "one" else ""
        raise _error(source, found[1], f"{operator.name} expects one {what}, got {len(found)}{hint}")
    if operator.name == "retrieve" and "from" not in call.options:
        raise _error(source, group, "retrieve expects a retriever, as in :from name")


def _leaf(call: _Call) -> Node:
    (form,) = call.operands
    assert isinstance(form, String)
    options = dict(call.options)
    if call.operator.name == "fragment":
        return Fragment(form.text, **options)
    return Retrieve(options.pop("from"), form.text, **options)


def _join(call: _Call, nodes: list[Node]) -> Node:
    options = {name: value for name, value in call.options.items() if name not in SAMPLING}
    sampling = Sampling(**{name: value for name, value in call.options.items() if name in SAMPLING})
    match call.operator.name:
        case "seq":
            return Seq(tuple(nodes))
        case "commute":
            return Commute(tuple(nodes), **options)
        case "generate":
            return Generate(nodes[0], sampling, **options)
        case "chat":
            return Chat(tuple(nodes), sampling)
        case role:
            return Message(_ROLES[role], tuple(nodes))
