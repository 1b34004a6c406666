"""A wide judge as a tree of narrow ones, where its author says that the judgement is associative."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from spanflow.errors import QueryError
from spanflow.ir.nodes import Chat, Commute, Generate, Message, Node, Retrieve, Seq
from spanflow.ir.walk import children, with_children
from spanflow.optimizer.rule import RuleSet
from spanflow.optimizer.rules.commute import joins

_UNSET_ARITY = 2
_ASSOCIATIVE = "commute(..., associative=True)"


def judge_tree(node: Generate) -> Node | None:
    """`G(+[a, b, c, d], tree) = G(+[G(+[a, b]), G(+[c, d])])`

    What stands around the commute, the judge's instructions, stands around each smaller one. At most `arity` operands
    are judged at a time, the tree is as shallow as that allows, and its leaves are at most one ply apart; n samples of
    a generate count as n operands. A commute with an unanswered retrieve waits for the answer. Raises QueryError
    where the tree would mean something else than the wide judge, or the author did not say that it may be one.
    """
    if node.reduce is None:
        return None
    if reason := why_no_tree(node):
        raise QueryError(f"generate: reduce='tree': {reason}")
    spine = _spine(node)
    if any(isinstance(operand, Retrieve) for operand in _operands(spine[-1])):
        return None
    judge = replace(node, reduce=None, arity=_UNSET_ARITY)
    candidates = list(_candidates(spine[-1]))
    return judge if len(candidates) <= node.arity else _Plies(spine, judge, node.arity).judge(candidates, node.n)


JUDGE_TREE: RuleSet = (judge_tree,)


def why_no_tree(node: Generate) -> str:
    """Why a judge that is to be a tree cannot be one, and what to do; empty where it can."""
    commutes, answers = _survey(node)
    chosen = [commute for commute in commutes if commute.associative]
    if not commutes and answers:
        return (
            f"its {len(answers)} candidates stand in an ordered join, which may not be judged in parts; join them "
            f"with {_ASSOCIATIVE} if their order does not matter"
        )
    if not commutes:
        return f"there is no commute whose operands could be judged in parts; join the candidates with {_ASSOCIATIVE}"
    if not chosen:
        return (
            "the author does not say that the judgement may be taken over parts of the operands first; "
            f"if it may, say {_ASSOCIATIVE}"
        )
    if len(chosen) > 1:
        return f"{len(chosen)} commutes are associative, and it is not clear which to judge in parts; leave it at one"
    num_candidates = sum(1 for _ in _candidates(chosen[0]))
    if num_candidates <= node.arity:
        return ""
    if answers:
        return (
            f"{len(answers)} generated answers stand beside the candidates, and each of the smaller judges would ask "
            "for them again, and get others; generate them within the candidates, or judge with reduce=None"
        )
    return ""


def _survey(node: Generate) -> tuple[list[Commute], list[Node]]:
    """The commutes that are read in order with the rest, and the answers outside of the associative ones."""
    commutes: list[Commute] = []
    answers: list[Node] = []
    stack: list[Node] = [node.query]
    while stack:
        inner = stack.pop()
        match inner:
            case Commute():
                commutes.append(inner)
                if not inner.associative:
                    answers += _answers(inner)
            case Generate() | Chat():
                answers.append(inner)
            case _:
                stack += children(inner)
    return commutes, answers


def _answers(root: Node) -> Iterator[Node]:
    stack = [root]
    while stack:
        inner = stack.pop()
        if isinstance(inner, Generate | Chat):
            yield inner
        else:
            stack += children(inner)


def _operands(commute: Node) -> Iterator[Node]:
    """The operands of a commute and of those that are operands of it."""
    stack = [commute]
    while stack:
        operand = stack.pop()
        if isinstance(operand, Commute):
            stack += reversed(operand.operands)
        else:
            yield operand


def _candidates(commute: Commute) -> Iterator[Node]:
    """The operands of a commute one by one: samples apart, and those of commutes inside each with its options."""
    stack: list[tuple[Node, Commute]] = [(operand, commute) for operand in reversed(commute.operands)]
    while stack:
        operand, outer = stack.pop()
        if isinstance(operand, Commute):
            inner = replace(
                operand,
                operands=commute.operands,
                rung=operand.rung or outer.rung,
                anchor=operand.anchor or outer.anchor,
            )
            stack += [(one, inner) for one in reversed(operand.operands)]
            continue
        for one in _samples(operand):
            yield one if outer is commute or joins(outer, commute) else replace(outer, operands=(one,))


def _samples(node: Node) -> Iterator[Node]:
    """The n samples of a generate as n generates; their seeds differ as their places do."""
    if isinstance(node, Generate) and node.n > 1:
        yield from (replace(node, n=1) for _ in range(node.n))
    else:
        yield node


def _spine(node: Generate) -> list[Any]:
    """The nodes from a judge down to its associative commute."""
    stack: list[list[Node]] = [[node]]
    while stack:
        spine = stack.pop()
        match spine[-1]:
            case Commute(associative=True):
                return spine
            case Seq() | Message():
                stack += [[*spine, child] for child in children(spine[-1])]
            case Generate() if len(spine) == 1:
                stack.append([node, node.query])
            case _:
                pass
    raise AssertionError("a judge without an associative commute has been refused")


class _Plies:
    """Builds a judge over any of the operands."""

    def __init__(self, spine: Sequence[Node], judge: Generate, arity: int) -> None:
        self.spine = spine
        self.top = judge
        self.arity = arity

    def judge(self, candidates: Sequence[Node], n: int) -> Generate:
        """The judge over these: itself where they are few enough, and else over judges of near-equal shares."""
        if len(candidates) > self.arity:
            candidates = [
                share[0] if len(share) == 1 else self.judge(share, 1) for share in _shares(candidates, self.arity)
            ]
        below: Node = self.spine[-1]
        inner = with_children(below, candidates)
        for above in reversed(self.spine[1:-1]):
            inner, below = with_children(above, [inner if c is below else c for c in children(above)]), above
        return replace(self.top, query=inner, n=n)


def _shares(candidates: Sequence[Node], arity: int) -> list[Sequence[Node]]:
    """Near-equal shares in order: as few as keep the tree as shallow as `arity` allows."""
    capacity = arity  # of the judge of one share
    while capacity * arity < len(candidates):
        capacity *= arity
    number = -(-len(candidates) // capacity)
    bounds = [len(candidates) * i // number for i in range(number + 1)]
    return [candidates[a:b] for a, b in pairwise(bounds)]
