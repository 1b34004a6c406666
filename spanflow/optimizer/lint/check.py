"""All checks, and the one function that runs them."""

from __future__ import annotations

from collections.abc import Collection

from spanflow.errors import QueryError
from spanflow.ir.nodes import Node
from spanflow.ir.ranges import check_count
from spanflow.ir.verify import verify
from spanflow.optimizer.lint.answers import (
    cannot_be_tree,
    holds_node,
    holds_placeholder,
    orders_candidates,
    retypes_answer,
)
from spanflow.optimizer.lint.finding import Check, Finding, Limits
from spanflow.optimizer.lint.heads import changes_head
from spanflow.optimizer.lint.order import asks_for_rank, holds_question, refers_to_order
from spanflow.optimizer.lint.reading import readings
from spanflow.optimizer.lint.window import overflows

CHECKS: tuple[Check, ...] = (
    Check("SF001", "an operand of a commute that says its place or points at another", refers_to_order),
    Check("SF002", "words that count the operands of a commute", asks_for_rank),
    Check("SF003", "a question inside the commute that it asks about", holds_question),
    Check("SF004", "more operands than fit the model's window", overflows),
    Check("SF005", "a system message that changes from request to request", changes_head),
    Check("SF006", "a node formatted into text", holds_node),
    Check("SF007", "a placeholder that nothing was put into", holds_placeholder),
    Check("SF008", "an answer written out among generated ones", retypes_answer),
    Check("SF009", "candidates in an ordered join", orders_candidates),
    Check("SF010", "a judge that cannot be the tree it is to be", cannot_be_tree),
)


def lint(
    root: Node,
    *,
    ignore: Collection[str] = (),
    max_model_len: int | None = None,
    max_tokens: int = 256,
) -> tuple[Finding, ...]:
    """What is likely not meant in a query, or slow without need: in reading order, by prompt and then by check.

    It is advice: texts are judged by their looks, and what is found may be right as it is. `ignore` has the codes
    of checks to leave out. `max_model_len` is the model's window and `max_tokens` the length of answers that name
    none, both in tokens; without a window nothing is said about it. Runs no engine. Raises QueryError for what is no
    query, and for codes that do not exist.

    >>> from spanflow import commute, generate, seq, user
    >>> from spanflow.optimizer.lint import lint
    >>> query = generate(seq(commute(user("Document 1: the sky."), user("Document 2: the sea.")), user("Blue?")))
    >>> [(finding.code, finding.path) for finding in lint(query)][0]
    ('SF001', '$.query.operands[0].operands[0].parts[0]')
    """
    known = [check.code for check in CHECKS]
    ignored = [ignore] if isinstance(ignore, str) else list(ignore)
    if unknown := [code for code in ignored if code not in known]:
        raise QueryError(f"lint: there is no check {', '.join(map(repr, unknown))}; checks are {', '.join(known)}")
    if max_model_len is not None:
        check_count(max_model_len, "lint: max_model_len", 1)
    check_count(max_tokens, "lint: max_tokens", 1)
    verify(root)
    limits = Limits(max_model_len, max_tokens)
    return tuple(
        Finding(check.code, place.path(), reason, fix)
        for reading in readings(root)
        for check in CHECKS
        if check.code not in ignored
        for place, reason, fix in check.find(reading, limits)
    )
