"""Chat is sugar."""

from __future__ import annotations

from spanflow.ir.nodes import Chat, Generate, Node, Seq
from spanflow.optimizer.rule import RuleSet


def chat(node: Chat) -> Node:
    """`C[m, ...] = G(✶[m, ...])`"""
    return Generate(Seq(node.messages), node.sampling)


CHAT: RuleSet = (chat,)
