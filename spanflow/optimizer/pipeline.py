"""A query through the passes: the same meaning, in the form that the planner and lowering do best with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spanflow.errors import OptimizerError, QueryError
from spanflow.ir.fidelity import Rung
from spanflow.ir.nodes import Node
from spanflow.ir.verify import Verified, verify
from spanflow.optimizer.driver import rewrite
from spanflow.optimizer.order import OrderHint, order_exact
from spanflow.optimizer.passes import DEFAULT, SIMPLIFY, Pass
from spanflow.optimizer.trace import PassTrace, Step


@dataclass(frozen=True, slots=True)
class Optimised:
    """The tree that came out, and what each pass did to it."""

    root: Node
    trace: tuple[PassTrace, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """All rewrites, in order."""
        return tuple(step for done in self.trace for step in done.steps)


def optimise(
    root: Node,
    *,
    passes: tuple[Pass, ...] = DEFAULT,
    rung: Rung | None = None,
    hint: OrderHint | None = None,
    trace: Callable[[Step], None] | None = None,
) -> Optimised:
    """Rewrite a query, pass by pass; it is verified before the first and after each one. Pure but for the hint.

    What the query means is preserved, in the sense of `ir.denotation`, by all passes but locality, which the author
    asks for. Doing it again changes nothing more. `rung` is the session's, for commutes that name none; `hint` knows
    good orders for exact commutes; `trace` is told of each rewrite as it happens.

    Raises QueryError for what is no query, or where a judge cannot be the tree that it is asked to be, and
    OptimizerError where rules never come to rest or break the query.

    >>> from spanflow import commute, generate, seq, user
    >>> from spanflow.ir.text import to_text
    >>> from spanflow.optimizer.pipeline import optimise
    >>> done = optimise(generate(seq(commute(commute(user("a")), user("b")), "Which?")))
    >>> print(to_text(done.root))
    (generate (seq (commute (user "a") (user "b")) (user "Which?")))
    >>> [(step.pass_name, step.rule, step.path) for step in done.steps]
    [('desugar', 'bare_text', '$'), ('simplify', 'flatten_commute', '$.query.operands[0]')]
    """
    verified = Verified()
    verify(root, verified)
    done: list[PassTrace] = []
    for each in passes:
        new, steps = rewrite(root, each.rules, at_root=each.at_root, name=each.name, listener=trace)
        if each.orders:
            new, ordered = order_exact(new, rung=rung, hint=hint, name=each.name, listener=trace)
            steps += ordered
        if new.digest != root.digest:
            try:
                verify(new, verified)
            except QueryError as error:
                raise OptimizerError(
                    f"pass {each.name!r} made a query that is none: {error}; it is the rules that are wrong, among "
                    f"{', '.join(dict.fromkeys(step.rule for step in steps))}"
                ) from error
        root = new
        done.append(PassTrace(each.name, each.why, root, steps, each.survey, rung))
    return Optimised(root, tuple(done))


def simplify(root: Node) -> Node:
    """The normal form of a tree under the laws of joins alone. Raises QueryError for what is no query."""
    return optimise(root, passes=(SIMPLIFY,)).root
