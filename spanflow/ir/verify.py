"""Is a tree a query that can mean something? Checked before and after each pass of the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, assert_never, get_args

from spanflow.errors import QueryError
from spanflow.ir.fidelity import Anchor, Rung, RungName
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Query, Retrieve, Role, Seq, Text
from spanflow.ir.ranges import MAX_N, check_count, check_sampling, check_text
from spanflow.ir.walk import children, holds, path_through

#: What a message may not hold.
_NOT_IN_MESSAGE: Mapping[type[Node], str] = {Message: "a message", Chat: "a chat"}
_ASKS = (Generate, Chat)
_TEXTS = (Text, Fragment)
#: What will bring something to read, or is refused for itself.
_ANSWERS = (Generate, Chat, Retrieve)
#: Characters of a text that are looked at wherever it stands; one that is longer is looked at once.
_MAX_AT_ONCE = 4_096
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
        return path_through(self._steps())

    def _steps(self) -> Iterator[tuple[Node, int]]:
        place = self
        while place.parent is not None:
            yield place.parent.node, place.number
            place = place.parent

    def may_have_samples(self) -> bool:
        return self.parent is None or type(self.parent.node) is Commute


class Verified:
    """The subtrees that were found right, so that trees which share them are verified sooner."""

    __slots__ = ("_has_content", "_right", "_roots")

    def __init__(self) -> None:
        self._roots: list[Node] = []  # kept alive: what is below them is known by its ids
        # By place, since a node may be right in one and wrong in another: whether it is in a message, and whether it
        # may have several samples there.
        self._right: dict[tuple[bool, bool], set[int]] = {
            (in_message, may_have_samples): set() for in_message in (False, True) for may_have_samples in (False, True)
        }
        self._has_content: dict[bytes, bool] = {}  # by digest

    def is_new(self, root: Node) -> bool:
        """Whether a tree is still to be looked at."""
        right = self._right[False, True]
        if id(root) in right:
            return False
        right.add(id(root))
        self._roots.append(root)
        return True

    def open_below(self, place: _Place) -> list[_Place]:
        """The places of those children that are still to be looked at, each once.

        Texts, fragments and messages of nothing else, most of a tree, are looked at here, and get no place.
        """
        node = place.node
        # What a generate reads are messages of its own, wherever it stands.
        message = node if type(node) is Message else None if type(node) in _ASKS else place.message
        right = self._right[message is not None, type(node) is Commute]
        below: list[_Place] = []
        for number, child in enumerate(children(node)):
            if id(child) in right or _is_right_leaf(child):
                continue
            right.add(id(child))
            if not (type(child) is Message and message is None and _is_right_message(child)):
                below.append(_Place(child, place, number, message))
        return below

    def has_content(self, ask: Generate | Chat) -> bool:
        """Whether there is anything to read below; mostly the first text says so."""
        return any(holds(child, _says_something, self._has_content) for child in children(ask))


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
    if not known.is_new(root):
        return
    asks: list[tuple[_Place, Generate | Chat]] = []
    stack = [_Place(root)]
    while stack:
        place = stack.pop()
        _check_node(place)
        if isinstance(place.node, _ASKS):
            asks.append((place, place.node))
        stack += reversed(known.open_below(place))
    for place, ask in reversed(asks):
        if not known.has_content(ask):
            what = "generate" if isinstance(ask, Generate) else "chat"
            raise QueryError(f"{place.path()}: this {what} has nothing to read: there is no text anywhere below it")


def _says_something(node: Node) -> bool | None:
    """Whether a node brings anything to read; None where what is below it has to say so."""
    if isinstance(node, _TEXTS):
        return node.text != ""
    return True if type(node) in _ANSWERS else None


def _is_right_leaf(node: Node) -> bool:
    """Whether a node is a text or a fragment in which nothing is wrong, as can be told at once."""
    if type(node) is Text:
        return _is_readable(node.text)
    if type(node) is Fragment:
        has_good_id = node.id is None or _is_readable(node.id)
        return _is_readable(node.text) and has_good_id and isinstance(node.metadata, Mapping)
    return False


def _is_right_message(message: Message) -> bool:
    """Whether nothing is wrong in a message, which holds texts and fragments alone."""
    is_right = message.role in _ROLES and type(message.parts) is tuple
    return is_right and all(map(_is_right_leaf, message.parts))


def _is_readable(text: object) -> bool:
    if type(text) is not str:
        return False
    if text.isascii():
        return True
    if len(text) > _MAX_AT_ONCE:
        return False
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
