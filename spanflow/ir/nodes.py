"""The span query as a tree of frozen nodes.

A node stores a digest of its whole subtree, made when it is built: equality and hashing cost
one comparison at any depth. Children are tuples; walks over them are iterative (`ir.walk`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal, TypeAlias

from spanflow.errors import QueryError
from spanflow.ir.copying import copied
from spanflow.ir.fidelity import Anchor, Rung

Role = Literal["system", "user", "assistant"]

#: Put behind each text operand of a `commute` inside a message, its last one too.
DEFAULT_SEPARATOR = "\n\n"


def _digest(tag: str, *parts: bytes, below: Sequence[bytes] = ()) -> bytes:
    """The digest of a node's own parts and of the digests below it, each of which follows its length."""
    pieces = [tag.encode()]
    for part in parts:
        pieces += _length(len(part)), part
    return blake2b(b"".join(pieces) + _LENGTH_OF_DIGEST.join([b"", *below]), digest_size=_DIGEST_SIZE).digest()


def _length(number: int) -> bytes:
    return number.to_bytes(8, "little")


_DIGEST_SIZE = 16
_LENGTH_OF_DIGEST = _length(_DIGEST_SIZE)


def _utf8(text: str, where: str) -> bytes:
    if not isinstance(text, str):
        raise QueryError(f"{where} must be text, got {type(text).__name__}")
    return text.encode("utf-8", "surrogatepass")


class Node:
    """Base of all nodes; compares and hashes by `digest`."""

    __slots__ = ()
    digest: bytes

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Node) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:  # a node may be 5,000 deep: never recurse
        return f"<{type(self).__name__} {self.digest.hex()[:8]}>"


def _as_float(value: float) -> float:
    try:
        return float(value) + 0.0
    except OverflowError:  # a whole number beyond all floats
        return math.inf


def _node_digest() -> Any:
    return field(init=False, repr=False, compare=False)


def _below(children: Sequence[Any], where: str) -> list[bytes]:
    try:
        return [child.digest for child in children]
    except AttributeError:
        index, child = next((i, child) for i, child in enumerate(children) if not isinstance(child, Node))
        raise QueryError(
            f"{where}[{index}] must be a node of a query, got {type(child).__name__}; "
            "system(), user(), seq() and the other functions of spanflow turn text and lists into nodes"
        ) from None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Text(Node):
    """Plain text: data, never markup."""

    text: str
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest("text", _utf8(self.text, "Text.text")))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Fragment(Node):
    """A piece of a corpus (F). `metadata` is carried, as it was when this was made; it is no part of the prompt."""

    text: str
    id: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        try:
            metadata = copied(dict(self.metadata))
            about = json.dumps([self.id, metadata], sort_keys=True, default=repr)
        except (TypeError, ValueError, RecursionError) as error:
            raise QueryError(f"fragment: metadata has no JSON form: {error}") from None
        text = _utf8(self.text, "Fragment.text")
        object.__setattr__(self, "metadata", metadata)
        object.__setattr__(self, "digest", _digest("fragment", text, about.encode("utf-8", "surrogatepass")))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Message(Node):
    """A chat message (S, U, A): a role and its parts."""

    role: Role
    parts: tuple[Node, ...]
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        role = _utf8(self.role, "Message.role")
        object.__setattr__(self, "digest", _digest("message", role, below=_below(self.parts, "Message.parts")))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Seq(Node):
    """Ordered join (x): associative, not commutative."""

    operands: tuple[Node, ...]
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", _digest("seq", below=_below(self.operands, "Seq.operands")))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Commute(Node):
    """Join (+) whose operands may stand in any order and need not see each other.

    `rung`, `anchor` of None mean the session's default. `associative` says that a judgement over
    these operands may be taken over parts of them first. `separator` follows each operand that is
    text inside a message.
    """

    operands: tuple[Node, ...]
    rung: Rung | None = None
    anchor: Anchor | None = None
    associative: bool = False
    separator: str = DEFAULT_SEPARATOR
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        options = f"{self.rung}|{self.anchor}|{self.associative}|{self.separator}".encode("utf-8", "surrogatepass")
        object.__setattr__(self, "digest", _digest("commute", options, below=_below(self.operands, "Commute.operands")))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one answer is sampled. `max_tokens` of None is the session's default; temperature 0 is greedy.

    `schema` is a JSON Schema as canonical JSON text, or None.
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    schema: str | None = None

    def __post_init__(self) -> None:
        # Numbers that are equal make equal nodes: 0, 0.0 and -0.0 are one temperature.
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                object.__setattr__(self, name, _as_float(value))

    def __repr__(self) -> str:  # part of the digest of each generate; what a dataclass makes takes three times as long
        return (
            f"Sampling(max_tokens={self.max_tokens!r}, temperature={self.temperature!r}, top_p={self.top_p!r}, "
            f"stop={self.stop!r}, seed={self.seed!r}, schema={self.schema!r})"
        )


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Generate(Node):
    """Ask the model (G); its value is an assistant message, or `n` of them inside a commute.

    `reduce` ('tree' or None) and `arity` ask for a tree of judges (see the optimizer's locality pass).
    Two equal nodes at two places are two samples: identity is the place in the tree.
    """

    query: Node
    sampling: Sampling = Sampling()
    n: int = 1
    model: str | None = None
    reduce: Literal["tree"] | None = None
    arity: int = 2
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        options = repr((self.sampling, self.n, self.model, self.reduce, self.arity)).encode("utf-8", "surrogatepass")
        object.__setattr__(self, "digest", _digest("generate", options, below=_below((self.query,), "Generate.query")))


Retriever: TypeAlias = Callable[..., Any] | Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Retrieve(Node):
    """Fragments from a corpus (R), answered by `binding.bind`; joined with + by the options given here."""

    retriever: Retriever
    query: str
    k: int | None = None
    rung: Rung | None = None
    anchor: Anchor | None = None
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        identity = f"{id(self.retriever)}|{self.k}|{self.rung}|{self.anchor}|{self.query}"
        object.__setattr__(self, "digest", _digest("retrieve", identity.encode("utf-8", "surrogatepass")))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Chat(Node):
    """Sugar (C): `generate` over the ordered join of messages."""

    messages: tuple[Node, ...]
    sampling: Sampling = Sampling()
    digest: bytes = _node_digest()

    def __post_init__(self) -> None:
        options = repr(self.sampling).encode("utf-8", "surrogatepass")
        object.__setattr__(self, "digest", _digest("chat", options, below=_below(self.messages, "Chat.messages")))


#: Every kind of node, for `match` with assert_never.
Query: TypeAlias = Text | Fragment | Message | Seq | Commute | Generate | Retrieve | Chat
