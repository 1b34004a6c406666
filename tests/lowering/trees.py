"""Short names for nodes, and texts for property tests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from spanflow.ir.nodes import Commute, Generate, Message, Node, Seq, Text


def node(value: Node | str) -> Node:
    return Text(value) if isinstance(value, str) else value


def sys_(*parts: Node | str) -> Message:
    return Message("system", tuple(map(node, parts)))


def user(*parts: Node | str) -> Message:
    return Message("user", tuple(map(node, parts)))


def bot(*parts: Node | str) -> Message:
    return Message("assistant", tuple(map(node, parts)))


def seq(*operands: Node | str) -> Seq:
    return Seq(tuple(map(node, operands)))


def plus(*operands: Node | str, **options: Any) -> Commute:
    return Commute(tuple(map(node, operands)), **options)


def gen(query: Node | str = "go", n: int = 1) -> Generate:
    return Generate(node(query), n=n)


#: Text without any control token: letters, digits, white space that tokenizers and templates treat in their own ways,
#: punctuation that control tokens are made of.
PLAIN = st.text(st.sampled_from("ab Zé9.,<>|[]/_\n\n\t  \r'中\u00a0🙂"), max_size=12)
WORDS = st.text(st.sampled_from("abc de\n.,"), min_size=1, max_size=12).filter(str.strip)
_SPELT = (
    *("<|im_start|>", "<|im_end|>", "<|im_", "end|>", "start|>", "<", "[INST]", "[/INST]", "<s>", "</s>", "<bos>"),
    *("<|eot_id|>", "<|start_header_id|>", "<end_of_turn>", "<think>", "</think>", "<table>", "user\n", " ", "hi"),
)
#: Text that spells control tokens, whole, in halves, nested and next to each other.
MARKED = st.lists(st.sampled_from(_SPELT), max_size=6).map("".join)
