"""The passes, in the order in which a query goes through them, and why each stands where it does.

A pass drives its rules to a fixed point; the laws are in `rules/`. What a pass has to say about the tree, besides
changing it, is its survey.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from spanflow.ir.fidelity import Rung
from spanflow.ir.nodes import Node
from spanflow.optimizer.candidates import all_candidates
from spanflow.optimizer.rule import RuleSet
from spanflow.optimizer.rules.bare_text import BARE_TEXT
from spanflow.optimizer.rules.chat import CHAT
from spanflow.optimizer.rules.commute import COMMUTE
from spanflow.optimizer.rules.judge_tree import JUDGE_TREE
from spanflow.optimizer.rules.seq import SEQ, SEQ_AT_ROOT
from spanflow.optimizer.rules.units import UNITS, UNITS_AT_ROOT
from spanflow.optimizer.trace import Survey


@dataclass(frozen=True, slots=True)
class Pass:
    """A named rule set. `at_root` are laws for the root alone; `orders` puts exact commutes in order besides."""

    name: str
    why: str
    rules: RuleSet = ()
    at_root: RuleSet = ()
    orders: bool = False
    survey: Survey | None = None


def _taken_over(root: Node, rung: Rung | None) -> Iterator[str]:
    for candidate in all_candidates(root, rung=rung):
        what = "taken over as a span" if candidate.taken_over else "read as its tokens, in full attention"
        yield f"{candidate.path}: {what}: {candidate.reason}"


DESUGAR = Pass(
    "desugar",
    "first: the laws that follow know generates and messages, not chats and bare text",
    CHAT + BARE_TEXT,
)
SIMPLIFY = Pass(
    "simplify",
    "before all that looks for candidates: one way to write each join, so that nesting cannot hide an operand",
    UNITS + SEQ + COMMUTE,
    UNITS_AT_ROOT + SEQ_AT_ROOT,
)
DISTRIBUTE = Pass(
    "distribute",
    "an operand that is generated is its own span by now; here it is said which outputs are taken over, and why not",
    survey=_taken_over,
)
LOCALITY = Pass(
    "locality",
    "behind simplify, which brings all candidates of a judge into one commute; it changes what is asked, so it is "
    "asked for: generate(..., reduce='tree') over commute(..., associative=True)",
    JUDGE_TREE,
)
ORDER = Pass(
    "order",
    "last: only the finished operands have the digests that say where each stands",
    orders=True,
)

DEFAULT: tuple[Pass, ...] = (DESUGAR, SIMPLIFY, DISTRIBUTE, LOCALITY, ORDER)
