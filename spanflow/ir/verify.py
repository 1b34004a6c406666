"""Is a tree a query that can mean something? Checked before and after each pass of the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, assert_never, get_args

from spanflow.errors import QueryError
from spanflow.ir.fidelity import Anchor, Rung, RungName
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Query, Retrieve, Role, Seq, Text
from spanflow.ir.ranges import MAX_N, check_count, check_sampling, check_text
from spanflow.ir.walk import ROOT, child_path, children

#: What a message may not hold.
_NOT_IN_MESSAGE: Mapping[type[Node], str] = {Message: "a message", Chat: "a chat"}
_ASKS = (Generate, Chat)
_KINDS = get_args(Query)
_ROLES = get_args(Role)
_RUNGS = get_args(RungName)
_ANCHORS = get_args(Anchor)


class _Place(NamedTuple):
    """A node where it stands in the tree; the path is spelled only when something is wrong."""

    node: Node
    parent: _Place | None = None
    number: int = 0
    message: Message | None = None

    def path(self) -> str:
        steps: list[tuple[Node, int]] = []
        place = self
        while place.parent is not None:
            steps.append((place.parent.node, place.number))
            place = place.parent
        path = ROOT
        for node, number in reversed(steps):
            path = child_path(node, path, number)
        return path

    def may_have_samples(self) -> bool:
        return self.parent is None or type(self.parent.node) is Commute


class Verified:
    """The subtrees that were found right, so that trees which share them are verified sooner."""

    __slots__ = ("_has_content", "_nodes", "_seen")

    def __init__(self) -> None:
        self._nodes: list[Node] = []  # kept alive: they are known by their ids
        self._seen: set[tuple[int, bool, bool]] = set()
        self._has_content: dict[int, bool] = {}

    def is_new(self, place: _Place) -> bool:
        """Whether a node was not yet seen in a place like this, where it would be right or wrong alike."""
        key = (id(place.node), place.message is not None, place.may_have_samples())
        if key in self._seen:
            return False
        self._seen.add(key)
        self._nodes.append(place.node)
        return True

    def open_below(self, place: _Place) -> list[_Place]:
        """The places of those children that are still to be looked at; plain texts, most of a tree, are not."""
        node = place.node
        # What a generate reads are messages of its own, wherever it stands.
        message = node if type(node) is Message else None if type(node) in _ASKS else place.message
        in_message, may_have_samples = message is not None, type(node) is Commute
        return [
            _Place(child, place, i, message)
            for i, child in enumerate(children(node))
            if not (type(child) is Text and child.text.isascii())
            and (id(child), in_message, may_have_samples) not in self._seen
        ]

    def note(self, place: _Place) -> None:
        """Note whether a node brings anything to read; a generate or chat with nothing to read is refused."""
        node = place.node
        has_content = isinstance(node, Retrieve) or any(
            child.text != "" if isinstance(child, Text | Fragment) else self._has_content[id(child)]
            for child in children(node)
        )
        if not has_content and isinstance(node, Generate | Chat):
            what = "generate" if isinstance(node, Generate) else "chat"
            raise QueryError(f"{place.path()}: this {what} has nothing to read: there is no text anywhere below it")
        self._has_content[id(node)] = has_content


def verify(root: Node, verified: Verified | None = None) -> None:
    """Refuse a tree that breaks a rule of the language.

    Fields have the types and ranges that they are declared with; a message holds text, fragments, generates (whose
    answers are part of what it says) and joins of them; a commute has operands, a chat has messages, and a generate has
    something to read; several samples of one generate stand directly in a commute, or the generate is the whole query.
    Raises QueryError, which begins with the path of the node, as in `$.query.operands[2]`. A subtree that stands at
    many places is looked at once, also over several calls with the same `verified`, which is of no more use after an
    error.
    """
    known = Verified() if verified is None else verified
    stack: list[tuple[_Place, bool]] = [(_Place(root), False)]
    while stack:
        place, done = stack.pop()
        if done:
            known.note(place)
            continue
        if not known.is_new(place):
            continue
        _check_node(place)
        if joins := known.open_below(place):
            stack.append((place, True))
            joins.reverse()
            stack += [(inner, False) for inner in joins]
        else:
            known.note(place)


def _check_node(place: _Place) -> None:
    if type(place.node) not in _KINDS:
        known = ", ".join(kind.__name__ for kind in _KINDS)
        raise QueryError(f"{place.path()}: {type(place.node).__name__} is no node of a query; nodes are {known}")
    if place.message is not None and (what := _NOT_IN_MESSAGE.get(type(place.node))):
        raise QueryError(
            f"{place.path()}: {what} stands inside a message of role {place.message.role!r}; messages do not nest: "
            "put it beside that message, in a seq or a commute"
        )
    try:
        _check_fields(place)
    except QueryError as error:
        raise QueryError(f"{place.path()}: {error}") from None


def _check_fields(place: _Place) -> None:
    node: Query = place.node  # type: ignore[assignment]
    match node:
        case Message():
            if node.role not in _ROLES:
                raise QueryError(f"message: {node.role!r} is no role; roles are {', '.join(_ROLES)}")
            _check_tuple(node.parts, "message: parts")
        case Seq():
            _check_tuple(node.operands, "seq: operands")
        case Commute():
            _check_commute(node)
        case Generate():
            _check_generate(place, node)
        case Text():
            check_text(node.text, "text")
        case Fragment():
            check_text(node.text, "fragment: text")
            _check_optional_text(node.id, "fragment: id")
            if not isinstance(node.metadata, Mapping):
                raise QueryError(f"fragment: metadata must be a mapping, got {type(node.metadata).__name__}")
        case Retrieve():
            _check_retrieve(node)
        case Chat():
            _check_tuple(node.messages, "chat: messages")
            if not node.messages:
                raise QueryError("chat: there are no messages")
            check_sampling(node.sampling, "chat")
        case _:
            assert_never(node)


def _check_commute(node: Commute) -> None:
    _check_tuple(node.operands, "commute: operands")
    if not node.operands:
        raise QueryError("commute: there are no operands; leave the commute out where there is nothing to join")
    _check_fidelity(node.rung, node.anchor, "commute")
    if not isinstance(node.associative, bool):
        raise QueryError(f"commute: associative must be True or False, got {node.associative!r}")
    check_text(node.separator, "commute: separator")


def _check_generate(place: _Place, node: Generate) -> None:
    check_sampling(node.sampling, "generate")
    check_count(node.n, "generate: n", 1, MAX_N)
    check_count(node.arity, "generate: arity", 2)
    _check_optional_text(node.model, "generate: model")
    if node.reduce not in (None, "tree"):
        raise QueryError(f"generate: reduce must be 'tree' or None, got {node.reduce!r}")
    if node.n > 1 and not place.may_have_samples():
        raise QueryError(
            f"generate: n={node.n} asks for {node.n} answers where the query around it reads one; "
            "put it directly into a commute, whose operands they become, or ask for n=1"
        )


def _check_retrieve(node: Retrieve) -> None:
    if node.retriever is None:
        raise QueryError("retrieve: there is no retriever")
    check_text(node.query, "retrieve: query")
    if node.k is not None:
        check_count(node.k, "retrieve: k", 1)
    _check_fidelity(node.rung, node.anchor, "retrieve")


def _check_fidelity(rung: object, anchor: object, where: str) -> None:
    if rung is not None and not (isinstance(rung, Rung) and rung.name in _RUNGS):
        raise QueryError(f"{where}: rung must be a Rung or None, got {rung!r}; as_rung('repair(32)') makes one")
    if anchor is not None and anchor not in _ANCHORS:
        raise QueryError(f"{where}: {anchor!r} is no anchor; known anchors: {', '.join(_ANCHORS)}")


def _check_tuple(value: object, where: str) -> None:
    if not isinstance(value, tuple):
        raise QueryError(f"{where} must be a tuple, which nobody can change later; got {type(value).__name__}")


def _check_optional_text(value: object, where: str) -> None:
    if value is not None:
        check_text(value, where)
