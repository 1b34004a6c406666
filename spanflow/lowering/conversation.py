"""The tree below one generate as a flat list of turns: who speaks, what is said, and which operand it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, assert_never

from spanflow.errors import QueryError
from spanflow.ir.fidelity import DEFAULT_RUNG, EXACT, MOVED, Anchor, Rung
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Query, Retrieve, Role, Seq, Text
from spanflow.ir.walk import child_path
from spanflow.lowering.prompt import SpanPrompt


@dataclass(frozen=True, slots=True)
class Generated:
    """The value of an inner generation, carried as ids.

    `prompt` is the inner prompt that produced it, `token_ids` what was sampled, possibly with an end-of-turn id
    at its end, and `text` the same as text. `is_leased`: its KV is kept for the reader; else it is read as its tokens.
    """

    prompt: SpanPrompt
    token_ids: tuple[int, ...]
    text: str
    is_leased: bool = True


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of a commute that is no part of another one. `group` numbers its commute.

    `rung` holds for its text, `answer_rung` for generated answers in it.
    """

    path: str
    group: int
    rung: Rung
    answer_rung: Rung
    anchor: Anchor


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of a message's content: text, or the ids of a generated answer. `operand` is an index or None."""

    text: str
    operand: int | None = None
    path: str = ""
    answer: Generated | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A message. `operand`: that of a commute of whole messages; `is_answer`: the message is one inner generation's."""

    role: Role
    chunks: tuple[Chunk, ...]
    path: str
    operand: int | None = None
    is_answer: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in order; `mixed` are the operands that hold generated answers: only these become spans there."""

    turns: tuple[Turn, ...]
    operands: tuple[Operand, ...]
    mixed: frozenset[int]


def converse(
    query: Node,
    *,
    generated: Mapping[str, tuple[Generated, ...]],
    rung: Rung | None,
    anchor: Anchor,
    path: str,
    end_ids: frozenset[int] = frozenset(),
) -> Conversation:
    """Flatten the operand of a generate, which stands at `path`.

    `generated` has the values of inner generations by their paths; `rung` and `anchor` are the session's; `end_ids`
    end an answer, and are left away where it stands inside a message. The walk does not recurse. Raises QueryError,
    naming the path, for what cannot stand where it does.
    """
    walk = _Walk(generated, rung, anchor, end_ids, _find_part_joins(query))
    walk.run(query, path)
    if not walk.turns:
        raise QueryError(f"{path}: the query is empty: there is no text for the model to answer")
    return Conversation(tuple(walk.turns), tuple(walk.operands), frozenset(walk.mixed))


class _Outer(NamedTuple):
    """What a commute says to one that is directly its operand; `group` is None where it makes no spans."""

    rung: Rung | None
    anchor: Anchor | None
    group: int | None


class _Scope(NamedTuple):
    operand: int | None = None
    outer: _Outer | None = None


class _Answer(NamedTuple):
    value: Generated


class _Visit(NamedTuple):
    node: Node | _Answer
    path: str
    scope: _Scope
    separator: str = ""


class _Separate(NamedTuple):
    text: str
    operand: int | None
    num_chunks: int


_Step: TypeAlias = _Visit | _Separate
_PLAIN = _Scope()


@dataclass(slots=True)
class _Walk:
    generated: Mapping[str, tuple[Generated, ...]]
    rung: Rung | None
    anchor: Anchor
    end_ids: frozenset[int]
    part_joins: frozenset[int]
    turns: list[Turn] = field(default_factory=list)
    operands: list[Operand] = field(default_factory=list)
    mixed: set[int] = field(default_factory=set)
    num_groups: int = 0

    def run(self, query: Node, path: str) -> None:
        """Messages, and what becomes a message of its own."""
        stack = [_Visit(query, path, _PLAIN)]
        while stack:
            visit = stack.pop()
            node, here, scope, _ = visit
            if isinstance(node, _Answer):
                said = bool(self._without_end(node.value))
                chunk = self._answer(node.value, node.value.token_ids, visit)
                self._add_turn("assistant", [chunk] if said else [], visit, is_answer=said)
                continue
            known: Query = node  # type: ignore[assignment]
            match known:
                case Text(text=text) | Fragment(text=text):
                    if text:
                        self._add_turn("user", [Chunk(_checked(text, here), scope.operand, here)], visit)
                case Message(role=role, parts=parts):
                    below = [_Visit(part, child_path(node, here, i), scope) for i, part in enumerate(parts)]
                    self._add_turn(role, self._parts(below), visit)
                case Seq():
                    stack += reversed(_in_order(known, here, scope))
                case Commute():
                    if scope.outer is None and id(node) in self.part_joins:
                        if chunks := self._parts([visit]):
                            self._add_turn("user", chunks, visit)
                    else:
                        stack += reversed(self._expand(known, here, scope))
                case Generate() | Chat():
                    stack.append(self._only_answer(known, here, scope))
                case Retrieve():
                    raise _unbound(here)
                case _:
                    assert_never(known)

    def _add_turn(self, role: Role, chunks: Sequence[Chunk], visit: _Visit, *, is_answer: bool = False) -> None:
        self.turns.append(Turn(role, tuple(chunks), visit.path, visit.scope.operand, is_answer))

    def _parts(self, visits: Sequence[_Visit]) -> list[Chunk]:
        """The content of one message."""
        chunks: list[Chunk] = []
        stack: list[_Step] = list(reversed(visits))
        while stack:
            visit = stack.pop()
            if isinstance(visit, _Separate):
                if len(chunks) > visit.num_chunks and visit.text:
                    chunks.append(Chunk(visit.text, visit.operand))
                continue
            node, here, scope, separator = visit
            if separator:
                stack.append(_Separate(_checked(separator, here), scope.operand, len(chunks)))
            if isinstance(node, _Answer):
                # An answer of no words, or one that is not there yet, makes its operand mixed like any other.
                chunk = self._answer(node.value, self._without_end(node.value), visit)
                if chunk.token_ids:
                    chunks.append(chunk)
                continue
            known: Query = node  # type: ignore[assignment]
            match known:
                case Text(text=text) | Fragment(text=text):
                    if text:
                        chunks.append(Chunk(_checked(text, here), scope.operand, here))
                case Seq():
                    stack += reversed(_in_order(known, here, scope))
                case Commute():
                    stack += reversed(self._expand(known, here, scope))
                case Generate() | Chat():
                    stack.append(self._only_answer(known, here, scope))
                case Message(role=role):
                    raise QueryError(
                        f"{here}: a {role} message stands inside a message; put it beside that message, in a seq or "
                        "a commute"
                    )
                case Retrieve():
                    raise _unbound(here)
                case _:
                    assert_never(known)
        return chunks

    def _expand(self, commute: Commute, path: str, scope: _Scope) -> list[_Visit]:
        """The operands of a commute, each with the options that hold for it; candidates one by one."""
        if not commute.operands:
            raise QueryError(f"{path}: commute has no operands; give it some, or leave it out")
        outer = scope.outer or _Outer(None, None, None)
        rung, anchor = commute.rung or outer.rung, commute.anchor or outer.anchor
        group = outer.group
        is_plain = scope.operand is not None  # inside a span everything is that span's text
        if not is_plain and group is None and (rung or self.rung) != EXACT:
            group, self.num_groups = self.num_groups, self.num_groups + 1
        inner = _Outer(rung, anchor, group)
        visits: list[_Visit] = []
        for index, node in enumerate(commute.operands):
            here = child_path(commute, path, index)
            if isinstance(node, Commute):  # its operands are operands of this one
                visits.append(_Visit(node, here, _Scope(scope.operand, inner)))
                continue
            values = self._values(node, here) if isinstance(node, Generate | Chat) else [node]
            for value in values:
                operand = scope.operand
                if not is_plain and group is not None:
                    operand = self._add_operand(here, group, rung, anchor)
                visits.append(_Visit(value, here, _Scope(operand), commute.separator))
        return visits

    def _add_operand(self, path: str, group: int, rung: Rung | None, anchor: Anchor | None) -> int:
        named = rung or self.rung
        self.operands.append(Operand(path, group, named or DEFAULT_RUNG, named or MOVED, anchor or self.anchor))
        return len(self.operands) - 1

    def _values(self, node: Generate | Chat, path: str) -> list[_Answer]:
        if path not in self.generated:
            known = ", ".join(self.generated) or "none"
            raise QueryError(f"{path}: this inner generation has no value yet (known: {known}); run it first")
        return [_Answer(value) for value in self.generated[path]]

    def _only_answer(self, node: Generate | Chat, path: str, scope: _Scope) -> _Visit:
        values = self._values(node, path)
        if len(values) != 1:
            raise QueryError(
                f"{path}: a generate outside a commute stands for 1 answer, got {len(values)}; "
                "put it directly into a commute, whose operands its candidates become"
            )
        return _Visit(values[0], path, _Scope(scope.operand))

    def _without_end(self, value: Generated) -> tuple[int, ...]:
        ids = value.token_ids
        return ids[:-1] if ids and ids[-1] in self.end_ids else ids

    def _answer(self, value: Generated, token_ids: tuple[int, ...], visit: _Visit) -> Chunk:
        if visit.scope.operand is not None:
            self.mixed.add(visit.scope.operand)
        return Chunk("", visit.scope.operand, visit.path, value, token_ids)


def _in_order(seq: Seq, path: str, scope: _Scope) -> list[_Visit]:
    plain = _Scope(scope.operand)
    return [_Visit(node, child_path(seq, path, i), plain) for i, node in enumerate(seq.operands)]


def _checked(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QueryError(
            f"{path}: character {error.start} of the text is half of a surrogate pair ({text[error.start]!r}), which "
            "no tokenizer can read; decode the text again, or replace it"
        ) from None
    return text


def _unbound(path: str) -> QueryError:
    return QueryError(f"{path}: this retrieve is not answered yet; bind() the query before it is lowered")


def _find_part_joins(query: Node) -> frozenset[int]:
    """The ids of those seqs and commutes that hold text alone: such a commute is one message's content."""
    found: set[int] = set()
    stack: list[tuple[Node, bool]] = [(query, False)]
    while stack:
        node, done = stack.pop()
        if not isinstance(node, Seq | Commute):
            continue
        if not done:
            stack.append((node, True))
            stack.extend((operand, False) for operand in node.operands)
        elif all(isinstance(o, Text | Fragment) or id(o) in found for o in node.operands):
            found.add(id(node))
    return frozenset(found)
