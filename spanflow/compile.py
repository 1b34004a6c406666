"""From what an author wrote to a frozen plan: everything that happens before an engine is asked."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from spanflow.api.coerce import described
from spanflow.api.combinators import user
from spanflow.api.messages import as_chat
from spanflow.binding import abind
from spanflow.errors import QueryError
from spanflow.ir.nodes import Chat, Generate, Node, Seq
from spanflow.ir.verify import verify
from spanflow.ir.walk import rebuild
from spanflow.optimizer.order import OrderHint
from spanflow.optimizer.pipeline import optimise
from spanflow.optimizer.trace import PassTrace
from spanflow.plan.graph import Plan, build_plan
from spanflow.runner.options import RunOptions

#: What can be asked: a query, or the text of one user message, or a list of messages.
Askable: TypeAlias = "Node | str | Iterable[Node | Mapping[str, Any] | tuple[str, Any]]"


@dataclass(frozen=True, slots=True)
class Compiled:
    """A query on its way: as it was bound, as the passes left it (and what each did), and its plan."""

    query: Node
    tree: Generate
    plan: Plan
    passes: tuple[PassTrace, ...] = ()


def as_generate(query: Askable) -> Generate:
    """The query as one question to the model, verified; what is no generate is what the model reads.

    Text is a user's message, and a list is a list of messages. Raises QueryError.
    """
    match query:
        case Generate():
            tree = query
        case Chat(messages=messages, sampling=sampling):
            tree = Generate(Seq(messages), sampling)
        case Node():
            tree = Generate(query)
        case str():
            tree = Generate(user(query))
        case Iterable() if not isinstance(query, Mapping | bytes):
            tree = Generate(Seq(as_chat(query, "query")))
        case _:
            raise QueryError(
                f"a session runs a query, text, or a list of messages; got {described(query)}. "
                "generate(...) makes a query"
            )
    verify(tree)
    return tree


async def bind_query(query: Askable) -> Node:
    """The query with an answer to each retrieve, which are all asked at once on the running loop. Raises QueryError."""
    return await abind(as_generate(query))


def compile_query(
    query: Node,
    options: RunOptions,
    *,
    model: str,
    adapters: Collection[str] = (),
    hint: OrderHint | None = None,
) -> Compiled:
    """Rewrite a bound query and plan it; pure, but for the hint, which is asked for orders of exact commutes.

    Behind this a generate names an adapter or nothing. Raises QueryError, also where it names an unknown model.
    """
    optimised = optimise(_without_name(query, model), rung=options.rung, hint=hint)
    tree = optimised.root
    assert isinstance(tree, Generate)
    plan = build_plan(tree, rung=options.rung, seed=options.seed)
    for generation in plan.order:
        name = generation.node.model
        if name not in (None, *adapters):
            known = ", ".join(map(repr, [model, *adapters]))
            raise QueryError(
                f"{generation.path}: generate: model {name!r} is neither this session's model nor one of its adapters "
                f"(known: {known}); open a session for it, or leave the model out"
            )
    return Compiled(query, tree, plan, optimised.trace)


def _without_name(query: Node, model: str) -> Node:
    """The query, its generates of the session's own model named alike: who reads the KV of whom depends on it."""
    return rebuild(
        query, lambda node: replace(node, model=None) if isinstance(node, Generate) and node.model == model else node
    )
