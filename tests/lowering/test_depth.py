"""Trees of any depth and width."""

from __future__ import annotations

import pytest
from lowering.conftest import Model
from lowering.families import FAMILIES, tiny
from lowering.trees import gen, plus, seq, sys_, user

from spanflow.ir.nodes import Node, Text
from spanflow.lowering.lower import Generated
from spanflow.lowering.template import ChatTemplate

DEPTH = 5000


@pytest.fixture(scope="module")
def small() -> Model:
    tokenizer = tiny(FAMILIES["chatml"])
    return Model(FAMILIES["chatml"], tokenizer, ChatTemplate(tokenizer))


def test_deep_joins_of_parts(small: Model) -> None:
    node: Node = Text("end")
    for number in range(DEPTH):
        node = plus("x", node) if number % 2 else seq("y", node)
    lowered = small.lower(user("D:", node, "Q"))
    assert len(lowered.prompt.spans) == 2  # the outermost commute has two operands
    assert small.text(lowered.prompt.token_ids).count("y") == DEPTH // 2


def test_deep_commutes_are_one(small: Model) -> None:
    node = plus("end")
    for number in range(DEPTH):
        node = plus(node) if number % 10 else plus(f"x{number}", node)
    assert len(small.lower(user("D:", node, "Q")).prompt.spans) == DEPTH // 10 + 1


def test_deep_joins_of_messages(small: Model) -> None:
    node: Node = user("end")
    for _ in range(DEPTH):
        node = seq(node)
    for _ in range(DEPTH):
        node = plus(node)
    lowered = small.lower(seq(sys_("s"), node, user("Q")))
    assert small.spans(lowered) == ["<|im_start|>user\nend<|im_end|>\n"]


def test_an_inner_generation_is_not_walked(small: Model) -> None:
    inner: Node = Text("end")
    for _ in range(DEPTH):
        inner = seq(inner)
    answer = Generated(small.lower(user("go")).prompt, small.ids("no"), "no")
    lowered = small.lower(seq(sys_("s"), plus(gen(inner)), user("Q")), {"$.query.operands[1].operands[0]": (answer,)})
    assert len(lowered.prompt.spans) == 1


def test_many_operands(small: Model) -> None:
    lowered = small.lower(user("D:", plus(*(f"document {n}" for n in range(2000))), "Q"), anchor="head")
    assert len(lowered.prompt.spans) == len(lowered.sources) == 2000


def test_a_long_conversation(small: Model) -> None:
    said = [(role, f"{role} {n}") for n in range(300) for role in ("user", "assistant")]
    query = seq(*(user(text) if role == "user" else seq(text) for role, text in said))
    assert small.lower(query).prompt.token_ids == small.joint(*(("user", text) for _, text in said))
