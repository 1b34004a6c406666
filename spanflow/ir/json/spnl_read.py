"""The forms of spnl, IBM's implementation of span queries, to nodes.

| spnl | here |
|---|---|
| `user`, `system`, `assistant` | a message |
| `plus` | commute |
| `cross`, `seq` | seq |
| `par` | seq: it says how to run (here what is independent runs concurrently anyway), and its order is kept |
| `g` | generate; a `max_tokens` of 0 is the default, and a `temperature` that is not given is 0.6, as there |
| `repeat` | generate with `n`, in a commute |
| `map` | a commute of one generate for each input |
| `monad` | an empty seq: its value is left out there, and what it warms up is cached here without being asked |
| `zip` of a message and a list | the list with the message before each of its operands |
| `augment` | retrieve, from a retriever that the caller gives for the document |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

from spanflow.errors import QueryError
from spanflow.ir.json.decode import loaded
from spanflow.ir.json.issues import validated
from spanflow.ir.json.path import ROOT, Place
from spanflow.ir.json.spnl_model import AugmentBody, GenerateBody, MapBody, MetadataBody, RepeatBody, Role, ZipBody
from spanflow.ir.json.spnl_parts import (
    JOINS,
    ROLES,
    DocumentRetrievers,
    SpnlDocument,
    document_of,
    only_key,
    operands_of,
    text_of,
)
from spanflow.ir.limits import MAX_DEPTH, MAX_NODES
from spanflow.ir.nodes import Commute, Generate, Message, Node, Retrieve, Sampling, Seq, Text
from spanflow.ir.reading import find_retriever, split_path
from spanflow.ir.verify import verify
from spanflow.ir.walk import children


def from_spnl(data: Mapping[str, Any] | str | bytes, *, retrievers: DocumentRetrievers | None = None) -> Node:
    """The query that JSON of spnl says, from text or from the values it stands for; one that `verify` accepts.

    The module's table says what becomes what. What has no counterpart is refused, and so is an unknown key.
    `retrievers` answers each `augment`: a mapping from names of documents, or a function that makes a retriever of
    an `SpnlDocument`. Raises QueryError that begins with a path, as in `$.g.input.plus[2]`.
    """
    reader = _Reader(retrievers)
    root = reader.read(loaded(data))
    try:
        verify(root)
    except QueryError as error:
        steps, problem = split_path(str(error))
        node, (_, place) = root, reader.places[id(root)]
        for step in steps:
            node = children(node)[step]
            _, place = reader.places.get(id(node), (node, place))
        raise QueryError(f"{place}: {problem}") from None
    return root


_Kind: TypeAlias = Literal["plus", "join", "g", "monad", "zip"]


class _Build(NamedTuple):
    """Make a node of the last `num_nodes` ones."""

    kind: _Kind
    place: Place
    num_nodes: int
    sampling: Sampling = Sampling()
    n: int = 1
    model: str = ""


class _Value(NamedTuple):
    value: Any
    place: Place
    depth: int


@dataclass(slots=True)
class _Reader:
    retrievers: DocumentRetrievers | None
    #: Where nodes come from, by their ids; each with its node, so that no id is used twice.
    places: dict[int, tuple[Node, Place]] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    stack: list[_Value | _Build] = field(default_factory=list)
    num_nodes: int = 0

    def read(self, root: Any) -> Node:
        self.stack.append(_Value(root, ROOT, 1))
        while self.stack:
            task = self.stack.pop()
            if isinstance(task, _Build):
                first = len(self.nodes) - task.num_nodes
                below = self.nodes[first:]
                del self.nodes[first:]
                self._add(_built(task, below), task.place)
                continue
            self.num_nodes += 1
            if self.num_nodes > MAX_NODES or task.depth > MAX_DEPTH:
                raise QueryError(
                    f"{task.place}: the query has more than {MAX_NODES:,} nodes or {MAX_DEPTH:,} levels; does a list "
                    "contain itself?"
                )
            self._value(task)
        (node,) = self.nodes
        return node

    def _add(self, node: Node, place: Place) -> None:
        self.places[id(node)] = node, place
        self.nodes.append(node)

    def _value(self, task: _Value) -> None:
        key = only_key(task.value, task.place)
        inner, here = task.value[key], task.place.at(key)
        match key:
            case "system" | "user" | "assistant":
                self._add(_message(key, inner, here), here)
            case "plus" | "cross" | "seq" | "par":
                self._list("plus" if key == "plus" else "join", operands_of(inner, here), here, task.depth)
            case "g":
                self._generate(inner, here, task.depth)
            case "repeat":
                self._repeat(inner, here, task.depth)
            case "map":
                self._add(_map(inner, here), here)
            case "monad":
                self.stack += [_Build("monad", here, 1), _Value(inner, here, task.depth + 1)]
            case "zip":
                self._zip(inner, here, task.depth)
            case _:
                self._add(self._augment(inner, here), here)

    def _list(self, kind: _Kind, operands: list[Any], place: Place, depth: int) -> None:
        self.stack.append(_Build(kind, place, len(operands)))
        self.stack.extend(_Value(operands[i], place.at(i), depth + 1) for i in range(len(operands) - 1, -1, -1))

    def _generate(self, value: Any, place: Place, depth: int, n: int = 1) -> None:
        body = validated(GenerateBody, value, place)
        self.stack.append(_Build("g", place, 1, _sampling(body), n, body.model))
        here = place.at("input")
        if not isinstance(body.input, list):
            self.stack.append(_Value(body.input, here, depth + 1))
        elif len(body.input) == 1:
            self.stack.append(_Value(body.input[0], here.at(0), depth + 1))
        else:
            self._list("join", operands_of(body.input, here), here, depth + 1)

    def _repeat(self, value: Any, place: Place, depth: int) -> None:
        body = validated(RepeatBody, value, place)
        given = [key for key in ("g", "generate", "query") if key in body.model_fields_set]
        if len(given) != 1:
            got = " and ".join(map(repr, given)) or "neither"
            raise QueryError(f"{place}: expected 'n' and one of 'g', 'generate' and 'query', got {got}")
        (key,) = given
        inner, here = value[key], place.at(key)
        if key == "query":
            if only_key(inner, here) != "g":
                raise QueryError(f"{here}: expected {{'g': ...}}, since only a generation can be repeated")
            inner, here = inner["g"], here.at("g")
        self._generate(inner, here, depth + 1, body.n)

    def _zip(self, value: Any, place: Place, depth: int) -> None:
        body = validated(ZipBody, value, place)
        first, second = place.at("first"), place.at("second")
        if only_key(body.first, first) not in ROLES:
            raise QueryError(
                f"{first}: cannot be said here: only a message can stand before each operand of a list; of anything "
                "else spnl uses one value many times. Write the list out"
            )
        key = only_key(body.second, second)
        around = second.at(key)
        operands, places = [body.second], [second]
        if key in JOINS:
            operands = operands_of(body.second[key], around)
            places = [around.at(i) for i in range(len(operands))]
        elif key not in (*ROLES, "g"):
            raise _many(second)
        for operand, here in zip(operands, places, strict=True):
            if only_key(operand, here) not in (*ROLES, "g"):
                raise _many(here)
        # spnl replaces a join of one by its operand before it puts the first between.
        kind: _Kind = "plus" if key == "plus" and len(operands) > 1 else "join"
        self.stack.append(_Build(kind, place, 2 * len(operands)))
        for operand, here in zip(reversed(operands), reversed(places), strict=True):
            self.stack += [_Value(operand, here, depth + 1), _Value(body.first, first, depth + 1)]

    def _augment(self, value: Any, place: Place) -> Node:
        body = validated(AugmentBody, value, place)
        asked = place.at("body")
        role = only_key(body.body, asked)
        if role not in ROLES:
            raise QueryError(
                f"{asked}: cannot be said here: a retrieve asks one question, which is known before anything runs; "
                f"expected a message, got {role!r}"
            )
        question = text_of(body.body[role], asked.at(role))
        document = document_of(body, place.at("doc"))
        try:
            retriever = self._retriever(document)
        except QueryError as error:
            raise QueryError(f"{place.at('doc', 0)}: {error}") from None
        return Retrieve(retriever, question)

    def _retriever(self, document: SpnlDocument) -> Any:
        if self.retrievers is None or isinstance(self.retrievers, Mapping):
            return find_retriever(document.name, self.retrievers)
        retriever = self.retrievers(document)
        if retriever is None:
            raise QueryError(f"the function given as retrievers= made no retriever for {document.name!a}")
        return retriever


def _many(place: Place) -> QueryError:
    return QueryError(
        f"{place}: cannot be said here: how many messages come of this is known only when it has run; expected a "
        "message or a 'g'. Write the zip out"
    )


def _message(role: Role, value: Any, place: Place) -> Node:
    return Message(role, (Text(text_of(value, place)),))


def _sampling(body: MetadataBody) -> Sampling:
    # A temperature of null is 0 in spnl.
    return Sampling(max_tokens=body.max_tokens or None, temperature=body.temperature or 0.0)


def _map(value: Any, place: Place) -> Node:
    body = validated(MapBody, value, place)
    metadata = validated(MetadataBody, body.metadata, place.at("metadata"))
    sampling = _sampling(metadata)
    messages = [_message("user", text, place.at("inputs", i)) for i, text in enumerate(body.inputs)]
    return Commute(tuple(Generate(message, sampling, model=metadata.model) for message in messages))


def _built(task: _Build, below: list[Node]) -> Node:
    if task.kind == "plus":
        return Commute(tuple(below))
    single = [Commute((node,)) if isinstance(node, Generate) and node.n > 1 else node for node in below]
    match task.kind:
        case "join":
            return Seq(tuple(single))
        case "g":
            return Generate(single[0], task.sampling, task.n, task.model)
        case _:
            return Seq(())
