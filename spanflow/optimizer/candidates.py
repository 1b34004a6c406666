"""Which inner generations an outer prompt takes over as spans, which not, and why.

A generation that stands in a commute of the outer query runs so that its output, token for token, is a span of the
outer prompt: neither its text nor its KV is made a second time. Where it stands in the commute, how deep and beside
what, makes no difference; what the author asked of the commute does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from spanflow.ir.fidelity import EXACT, MOVED, Rung
from spanflow.ir.nodes import Chat, Commute, Generate, Node
from spanflow.ir.walk import ROOT, child_path, children


@dataclass(frozen=True, slots=True)
class Candidate:
    """An inner generation, at `path`, and what its outer prompt does with its output.

    `commute_path` is that of the commute whose operand it is or stands in, the outermost that makes spans; None where
    there is none. `num_samples` is how many outputs it has. `rung` says how an output that is taken over is treated,
    `reason` why it is taken over or not.
    """

    path: str
    node: Generate | Chat
    commute_path: str | None
    num_samples: int
    taken_over: bool
    rung: Rung
    reason: str


def candidates(outer: Generate | Chat, path: str = ROOT, *, rung: Rung | None = None) -> tuple[Candidate, ...]:
    """The generations whose outputs the prompt of `outer` reads, in reading order; not those within these.

    `rung` is the session's, for commutes that name none; None where it names none either.

    >>> from spanflow import commute, generate, seq, user
    >>> from spanflow.optimizer.candidates import candidates
    >>> judge = generate(seq(generate("Plan."), commute(generate("Write.", n=4)), user("Which is best?")))
    >>> [(found.path, found.num_samples, found.taken_over) for found in candidates(judge)]
    [('$.query.operands[0]', 1, False), ('$.query.operands[1].operands[0]', 4, True)]
    """
    found: list[Candidate] = []
    stack = [(child, child_path(outer, path, i), _NOWHERE) for i, child in enumerate(children(outer))]
    stack.reverse()
    while stack:
        node, here, scope = stack.pop()
        if isinstance(node, Generate | Chat):
            found.append(_candidate(node, here, scope, outer, rung))
            continue
        below = _operand_scopes(node, here, scope, rung) if isinstance(node, Commute) else None
        inside = scope._replace(commute=None)
        for i in range(len(children(node)) - 1, -1, -1):
            stack.append((children(node)[i], child_path(node, here, i), inside if below is None else below[i]))
    return tuple(found)


def all_candidates(root: Node, *, rung: Rung | None = None) -> Iterator[Candidate]:
    """The candidates of every generation of a tree, outer ones first."""
    stack = [(root, ROOT)]
    while stack:
        node, path = stack.pop()
        if isinstance(node, Generate | Chat):
            inner = candidates(node, path, rung=rung)
            yield from inner
            stack += [(candidate.node, candidate.path) for candidate in reversed(inner)]
        else:
            stack += [(child, child_path(node, path, i)) for i, child in enumerate(children(node))][::-1]


class _Above(NamedTuple):
    """What the commutes say of which a node is directly an operand. `makes_spans`: they make one group of spans."""

    rung: Rung | None
    makes_spans: bool
    path: str


class _Scope(NamedTuple):
    """Where a node stands. `span_rung`: how answers in the span that it is part of are treated, if it is of one."""

    span_path: str | None = None
    span_rung: Rung | None = None
    exact_path: str | None = None
    commute: _Above | None = None


_NOWHERE = _Scope()


def _operand_scopes(commute: Commute, path: str, scope: _Scope, session: Rung | None) -> list[_Scope]:
    """The scopes of the operands of a commute. A commute directly in a commute is no operand: its operands are."""
    above = scope.commute
    rung = commute.rung or (above.rung if above else None)
    in_span = scope.span_path is not None
    makes_spans = not in_span and ((above is not None and above.makes_spans) or (rung or session) != EXACT)
    first = above.path if above and above.makes_spans == makes_spans else path
    if in_span:
        operand = _Scope(scope.span_path, scope.span_rung)
    elif makes_spans:
        operand = _Scope(first, rung or session or MOVED)
    else:
        operand = _Scope(exact_path=scope.exact_path or path)
    inner = scope._replace(commute=_Above(rung, makes_spans, first))
    return [inner if isinstance(child, Commute) else operand for child in commute.operands]


def _candidate(
    node: Generate | Chat, path: str, scope: _Scope, outer: Generate | Chat, session: Rung | None
) -> Candidate:
    num_samples = node.n if isinstance(node, Generate) else 1
    model, outer_model = _model(node), _model(outer)
    rung = scope.span_rung or EXACT
    if scope.span_path is None and scope.exact_path is None:
        reason = "it stands in order with what is around it, which it has to see"
    elif rung == EXACT and session == EXACT and scope.span_rung is None:
        reason = "the session is exact, and its commute asks for nothing else"
    elif rung == EXACT:
        reason = "its commute is exact"
    elif model != outer_model:
        reason = f"it comes from {_named(model)}, and the prompt is for {_named(outer_model)}: their KV differs"
    else:
        return Candidate(path, node, scope.span_path, num_samples, True, rung, f"an operand of a commute, {rung}")
    return Candidate(path, node, scope.span_path or scope.exact_path, num_samples, False, EXACT, reason)


def _model(node: Generate | Chat) -> str | None:
    return node.model if isinstance(node, Generate) else None


def _named(model: str | None) -> str:
    return "the session's model" if model is None else f"model {model!r}"
