"""`verify` accepts what the language allows, and names the place and the reason where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from strategies import queries, shelf

from spanflow.errors import QueryError
from spanflow.ir.fidelity import Rung
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Sampling, Seq, Text
from spanflow.ir.verify import verify
from spanflow.ir.walk import preorder, rebuild

A, B = Text("a"), Text("b")
U = Message("user", (A,))


def refused(root: Node) -> str:
    with pytest.raises(QueryError) as failure:
        verify(root)
    return str(failure.value)


@given(queries())
def test_what_the_language_allows_is_accepted(root: Node) -> None:
    assert verify(root) is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (Seq((U, Message("user", (U,)))), "$.operands[1].parts[0]: a message stands inside a message of role 'user'"),
        (
            Message("system", (Commute((A, Seq((B, U)))),)),
            "$.parts[0].operands[1].operands[1]: a message stands inside a message of role 'system'",
        ),
        (
            Message("user", (Generate(Message("user", (A, U))),)),
            "$.parts[0].query.parts[1]: a message stands inside a message of role 'user'",
        ),
        (Message("user", (Generate(U, n=2),)), "$.parts[0]: generate: n=2 asks for 2 answers"),
        (
            Message("user", (Commute((Seq((Chat((U,)),)),)),)),
            "$.parts[0].operands[0].operands[0]: a chat stands inside",
        ),
        (Message("user", (Chat((U,)),)), "$.parts[0]: a chat stands inside a message"),
        (Generate(Seq((U, Commute(())))), "$.query.operands[1]: commute: there are no operands"),
        (Generate(Seq(())), "$: this generate has nothing to read"),
        (
            Seq((U, Generate(Seq((Message("system", (Text(""),)), Message("user", ())))))),
            "$.operands[1]: this generate has nothing to read: there is no text anywhere below it",
        ),
        (Chat((Message("user", (Fragment(""),)),)), "$: this chat has nothing to read"),
        (Commute((U, Chat(()))), "$.operands[1]: chat: there are no messages"),
        (
            Generate(Seq((U, Generate(U, n=3)))),
            "$.query.operands[1]: generate: n=3 asks for 3 answers where the query around it reads one",
        ),
        (Generate(Generate(U, n=2)), "$.query: generate: n=2 asks for 2 answers"),
        (Commute((Seq((Generate(U, n=2),)),)), "$.operands[0].operands[0]: generate: n=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_rule_is_named_with_its_place(root: Node, message: str) -> None:
    assert refused(root).startswith(message)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Seq([A]), "seq: operands must be a tuple, which nobody can change later; got list"),  # type: ignore[arg-type]
        (Commute([A]), "commute: operands must be a tuple"),  # type: ignore[arg-type]
        (Message("user", [A]), "message: parts must be a tuple"),  # type: ignore[arg-type]
        (Chat([U]), "chat: messages must be a tuple"),  # type: ignore[arg-type]
        (Message("tool", (A,)), "message: 'tool' is no role; roles are system, user, assistant"),  # type: ignore[arg-type]
        (Text("ab\ud800c"), "text: the character at position 2 is half of a surrogate pair (\\ud800)"),
        (Fragment("\udfff"), "fragment: text: the character at position 0"),
        (Fragment("a", 5), "fragment: id: must be text, got 5"),  # type: ignore[arg-type]
        (Commute((A,), "moved"), "commute: rung must be a Rung or None, got 'moved'"),  # type: ignore[arg-type]
        (Commute((A,), Rung("copied")), "commute: rung must be a Rung or None"),  # type: ignore[arg-type]
        (Commute((A,), None, "tail"), "commute: 'tail' is no anchor; known anchors: header, head, none"),  # type: ignore[arg-type]
        (Commute((A,), associative="yes"), "commute: associative must be True or False, got 'yes'"),  # type: ignore[arg-type]
        (Commute((A,), separator="\ud800"), "commute: separator: the character at position 0"),
        (Retrieve(None, "q"), "retrieve: there is no retriever"),
        (Retrieve(shelf, 5), "retrieve: query: must be text, got 5"),  # type: ignore[arg-type]
        (Retrieve(shelf, "q", 0), "retrieve: k: must be a whole number at least 1, got 0"),
        (Retrieve(shelf, "q", True), "retrieve: k: must be a whole number at least 1, got True"),
        (Retrieve(shelf, "q", 1, "exact"), "retrieve: rung must be a Rung"),  # type: ignore[arg-type]
        (Generate(U, n=0), "generate: n: must be a whole number from 1 to 255, got 0"),
        (Generate(U, n=256), "generate: n: must be a whole number from 1 to 255, got 256"),
        (Generate(U, arity=1), "generate: arity: must be a whole number at least 2, got 1"),
        (Generate(U, model=7), "generate: model: must be text, got 7"),  # type: ignore[arg-type]
        (Generate(U, reduce="list"), "generate: reduce must be 'tree' or None, got 'list'"),  # type: ignore[arg-type]
        (Generate(U, {"max_tokens": 5}), "generate: must be a Sampling, got dict"),  # type: ignore[arg-type]
        (Generate(U, Sampling(0)), "generate: max_tokens: must be a whole number at least 1, got 0"),
        (Generate(U, Sampling(2**63)), "generate: max_tokens: must be a whole number"),
        (Generate(U, Sampling(temperature=-0.5)), "generate: temperature: must be a number of at least 0"),
        (Generate(U, Sampling(temperature=float("inf"))), "generate: temperature: must be a number of at least 0"),
        (Generate(U, Sampling(temperature=float("nan"))), "generate: temperature: must be a number of at least 0"),
        (Generate(U, Sampling(top_p=0.0)), "generate: top_p: must be a number above 0 and at most 1, got 0.0"),
        (Generate(U, Sampling(top_p=1.5)), "generate: top_p: must be a number above 0 and at most 1, got 1.5"),
        (Generate(U, Sampling(seed=-1)), "generate: seed: must be a whole number at least 0, got -1"),
        (Generate(U, Sampling(stop="a")), "generate: stop: must be a tuple of texts, got str"),  # type: ignore[arg-type]
        (Generate(U, Sampling(stop=("a", ""))), "generate: stop[1]: an empty stop string would stop every answer"),
        (Generate(U, Sampling(stop=("a",) * 17)), "generate: stop: at most 16 stop strings, got 17"),
        (Chat((U,), Sampling(schema={})), "chat: schema: must be text, got dict"),  # type: ignore[arg-type]
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_field_of_the_wrong_kind_is_named_with_its_place(node: Node, message: str) -> None:
    assert refused(node).startswith(f"$: {message}")
    assert refused(Seq((U, node))).startswith(f"$.operands[1]: {message}")


@pytest.mark.parametrize(
    ("node", "message"),
    [
        (Text("ab\ud800c"), "text: the character at position 2 is half of a surrogate pair"),
        (Text("é" * 5_000 + "\ud800"), "text: the character at position 5000 is half of a surrogate pair"),
        (Fragment("\udfff"), "fragment: text: the character at position 0"),
        (Fragment("a", 5), "fragment: id: must be text, got 5"),  # type: ignore[arg-type]
        (Fragment("a", "\ud800"), "fragment: id: the character at position 0"),
    ],
)
def test_what_is_wrong_among_the_parts_of_a_message_is_named(node: Node, message: str) -> None:
    assert refused(Seq((U, Message("user", (A, node, B))))).startswith(f"$.operands[1].parts[1]: {message}")


def test_a_long_text_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[object] = []
    monkeypatch.setattr("spanflow.ir.verify.check_text", lambda text, where: looked_at.append(text))
    long = Text("é" * 5_000)
    verify(Seq((Seq((long, A)), *(Message("user", (Text(str(i)), long)) for i in range(50)))))
    # Outside of messages and in them.
    assert len(looked_at) <= 2


def test_metadata_must_be_a_mapping() -> None:
    node = Fragment("a")
    object.__setattr__(node, "metadata", ["page", 1])
    assert refused(node) == "$: fragment: metadata must be a mapping, got list"


def test_a_node_of_another_kind_is_named() -> None:
    class Stranger(Node):
        digest = b"0"

    assert refused(Seq((A, Stranger()))).startswith("$.operands[1]: Stranger is no node of a query; nodes are Text,")


@pytest.mark.parametrize(
    "root",
    [
        A,
        Seq(()),
        Message("user", ()),
        Generate(Message("user", (Text(""), Retrieve(shelf, "q")))),
        Generate(U, n=5),
        Commute((Generate(U, n=5), Generate(U))),
        Generate(Seq((Message("system", ()), Generate(U)))),
        Message("user", (Retrieve(shelf, "q"), Commute((Seq((A, B)), Fragment("f"))))),
        Generate(Message("user", (Generate(U),))),
        Message("user", (A, Commute((Generate(Seq((U, Chat((U,))))), Generate(U, n=5), A)), B)),
    ],
    ids=lambda root: type(root).__name__,
)
def test_what_looks_odd_but_has_a_meaning_is_accepted(root: Node) -> None:
    assert verify(root) is None  # type: ignore[func-returns-value]


@given(queries())
def test_a_message_put_into_any_message_is_found(root: Node) -> None:
    def spoil(node: Node) -> Node:
        return replace(node, parts=(*node.parts, U)) if isinstance(node, Message) else node

    spoiled = rebuild(root, spoil)
    paths = [path for path, node in preorder(spoiled) if isinstance(node, Message) and U in node.parts]
    if paths:
        assert refused(spoiled).startswith(f"{paths[0]}.parts[")
    else:
        assert spoiled is root


def test_a_subtree_is_judged_at_each_place() -> None:
    twice = Generate(U, n=2)
    verify(Commute((twice, twice)))
    assert refused(Seq((Commute((twice,)), twice))).startswith("$.operands[1]: generate: n=2")
    assert refused(Commute((U, Message("user", (U,))))).startswith("$.operands[1].parts[0]: a message stands inside")


def test_depth_and_sharing_are_no_obstacle() -> None:
    deep: Any = U
    for _ in range(5_000):
        deep = Seq((deep, Commute((A,))))
    verify(Generate(deep))
    assert (
        refused(Generate(rebuild(deep, lambda node: Text("\ud800") if node == U else node))).count("operands") == 5_000
    )
    shared: Node = U
    for _ in range(60):
        shared = Seq((shared, shared))
    verify(shared)
