"""Chat messages from the forms that authors have them in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import get_args

from spanflow.api.coerce import as_node, as_text, described
from spanflow.errors import QueryError
from spanflow.ir.nodes import Chat, Message, Node, Role

_ROLES: tuple[Role, ...] = get_args(Role)


def as_message(role: Role, parts: tuple[Node, ...], where: str) -> Message:
    """A message of parts that may stand in one. Raises QueryError."""
    if not parts:
        raise QueryError(f"{where}: a message needs at least one part; '' makes an empty one on purpose")
    for number, part in enumerate(parts, 1):
        if isinstance(part, Message | Chat):
            kind = type(part).__name__.lower()
            raise QueryError(
                f"{where}: argument {number} is a {kind}, and messages do not nest; put it beside the message, "
                "as in seq(system(...), generate(...), user(...))"
            )
    return Message(role, parts)


def as_chat(messages: object, where: str) -> tuple[Node, ...]:
    """The messages of a chat, in order, from nodes, pairs and dicts. Raises QueryError."""
    if isinstance(messages, str | bytes | Mapping | Node) or not isinstance(messages, Iterable):
        raise QueryError(f"{where}: expected a list of messages, got {described(messages)}; one message is a list too")
    nodes = tuple(_as_turn(message, f"{where}[{index}]") for index, message in enumerate(messages))
    if not nodes:
        raise QueryError(f"{where}: there are no messages")
    return nodes


def _as_turn(message: object, where: str) -> Node:
    match message:
        case Node():
            return message
        case (str() as role, content):
            return as_message(_as_role(role, where), (_as_content(content, where),), where)
        case Mapping():
            return _from_dict(message, where)
        case str():
            raise QueryError(f"{where}: text without a role; write user(...) or ('user', ...)")
        case _:
            raise QueryError(
                f"{where}: expected a message, a (role, text) pair or a dict with 'role' and 'content', "
                f"got {described(message)}"
            )


def _from_dict(message: Mapping[object, object], where: str) -> Message:
    for key in ("role", "content"):
        if key not in message:
            raise QueryError(f"{where}: the message has no {key!r}; it has {_names(message)}")
    if unknown := [key for key in message if key not in ("role", "content")]:
        raise QueryError(f"{where}: a message has 'role' and 'content' only; {_names(unknown)} would be lost")
    role = _as_role(message["role"], f"{where}.role")
    return as_message(role, (_as_content(message["content"], f"{where}.content"),), where)


def _as_content(content: object, where: str) -> Node:
    if isinstance(content, list | tuple):
        content = [_as_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return as_node(content, where)


def _as_part(part: object, where: str) -> object:
    if not isinstance(part, Mapping):
        return part
    if part.get("type") != "text" or set(part) != {"type", "text"}:
        raise QueryError(
            f"{where}: of parts with a type only {{'type': 'text', 'text': ...}} is read, got {_names(part)}"
        )
    return as_text(part["text"], f"{where}.text")


def _as_role(role: object, where: str) -> Role:
    for known in _ROLES:
        if role == known:
            return known
    shown = repr(role) if isinstance(role, str) else described(role)
    raise QueryError(f"{where}: {shown} is no role; roles are {', '.join(_ROLES)}")


def _names(keys: Iterable[object]) -> str:
    return ", ".join(map(repr, keys)) or "nothing"
