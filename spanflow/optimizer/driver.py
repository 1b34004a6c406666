"""The one driver: a rule set, over a whole tree, until no rule applies anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from spanflow.errors import OptimizerError, QueryError
from spanflow.ir.nodes import Fragment, Message, Node, Retrieve, Text
from spanflow.ir.verify import CHAT_LEVEL
from spanflow.ir.walk import children, with_children
from spanflow.optimizer.rule import Rule, RuleSet, by_kind
from spanflow.optimizer.trace import Place, Step, short_path

#: Rewrites that any query may take, and how many more for each of its nodes.
_FREE_STEPS = 1_000
_STEPS_PER_NODE = 10
#: How far below a child it is checked, without a frame for each node, that nothing is to be done; not below nodes
#: with few children, whose descendants would be looked at again from each of many levels.
_LOOK_AHEAD = 3
_FEW = 4
_LEAVES: frozenset[type[Node]] = frozenset({Text, Fragment, Retrieve})


class Rewritten(NamedTuple):
    """The normal form of a tree under a rule set, and the rewrites that led to it."""

    root: Node
    steps: tuple[Step, ...]


def rewrite(
    root: Node,
    rules: RuleSet,
    *,
    at_root: RuleSet = (),
    name: str = "rewrite",
    budget: int | None = None,
    listener: Callable[[Step], None] | None = None,
) -> Rewritten:
    """Apply `rules` until none of them applies to any node, and `at_root` besides to the root.

    Each node is asked about before its children, which lets a rule take a whole nest at once, and again when a child
    has changed. Equal subtrees are rewritten once: results are remembered by digest. `budget` is the number of
    rewrites that may happen, by default in proportion to the size of the tree; `listener` is told of each.

    Raises OptimizerError that names the rules where they go round in a circle or never end, and QueryError, beginning
    with the path of the node, where a rule refuses the query.
    """
    if not rules and not at_root:
        return Rewritten(root, ())
    run = _Run(root, rules, at_root, name, budget, listener)
    return Rewritten(run.run(), tuple(run.steps))


@dataclass(slots=True, eq=False)
class _Frame:
    """A node on the way to its normal form.

    `seen` has the digests that it had so far, with the number of steps made before each; all have one normal form.
    """

    place: Place
    node: Node
    seen: dict[bytes, int]
    below: tuple[Node, ...] | None = None
    done: list[Node] = field(default_factory=list)


class _Run:
    def __init__(
        self,
        root: Node,
        rules: RuleSet,
        at_root: RuleSet,
        name: str,
        budget: int | None,
        listener: Callable[[Step], None] | None,
    ) -> None:
        self.root = root
        self.name = name
        self.rules = by_kind(rules)
        self.root_rules = by_kind(rules + at_root)
        self.budget = budget
        self.listener = listener
        self.steps: list[Step] = []
        self.normal: dict[bytes, Node] = {}
        self.at_hand: tuple[Node, Rule, Node] | None = None  # what a rule makes of the node that comes next
        # What need not be entered: no rule looks at it, nor at anything that may stand below it.
        self.closed = {leaf for leaf in _LEAVES if leaf not in self.rules}
        if Message not in self.rules and self.rules.keys() <= CHAT_LEVEL.keys():
            self.closed.add(Message)

    def run(self) -> Node:
        stack = [_Frame(Place(), self.root, {self.root.digest: 0})]
        while True:
            frame = stack[-1]
            node = frame.node
            if frame.below is None:
                node = self.settle(frame, self.rules if len(stack) > 1 else self.root_rules)
                frame.below, frame.done = children(node), []
            entered = self.find_open(frame)
            if entered is not None:
                stack.append(entered)
                continue
            new = with_children(node, frame.done)
            if new is not node:  # its rules may apply now
                self.change(frame, new)
                frame.below = None
                continue
            stack.pop()
            if not stack:
                return node
            for digest in frame.seen:
                self.normal[digest] = node
            stack[-1].done.append(node)

    def settle(self, frame: _Frame, table: Mapping[type[Node], RuleSet]) -> Node:
        """Apply rules to the node itself, until none does."""
        while True:
            node = frame.node
            at_hand, self.at_hand = self.at_hand, None
            if at_hand is not None and at_hand[0] is node:
                rule, new = at_hand[1:]
            else:
                try:
                    found = _first(node, table)
                except QueryError as error:
                    raise QueryError(f"{short_path(frame.place.path())}: {error}") from None
                if found is None:
                    return node
                rule, new = found
            step = Step(self.name, rule.__name__, frame.place, node.digest, new.digest)
            self.steps.append(step)
            if self.listener is not None:
                self.listener(step)
            self.check_budget(step, new)
            self.change(frame, new)

    def find_open(self, frame: _Frame) -> _Frame | None:
        """Go on with the children of a frame, up to the first one whose normal form is not known."""
        assert frame.below is not None
        done, closed, normal = frame.done, self.closed, self.normal
        depth = _LOOK_AHEAD if len(frame.below) > _FEW else 0
        for index in range(len(done), len(frame.below)):
            child = frame.below[index]
            if type(child) in closed:
                done.append(child)
            elif (known := normal.get(child.digest)) is not None:
                done.append(child if known.digest == child.digest else known)
            elif self.is_normal(child, depth):
                normal[child.digest] = child
                done.append(child)
            else:
                return _Frame(Place(frame.place, frame.node, index), child, {child.digest: len(self.steps)})
        return None

    def is_normal(self, node: Node, depth: int) -> bool:
        """Whether no rule applies here and a little below: true of most nodes, which then need no frame."""
        closed, normal = self.closed, self.normal
        for child in children(node):
            if type(child) not in closed and normal.get(child.digest) is not child:
                if not depth or not self.is_normal(child, depth - 1):
                    return False
                normal[child.digest] = child
        try:
            found = _first(node, self.rules)
        except QueryError:
            return False  # its frame says where it is
        if found is not None:
            self.at_hand = (node, *found)
        return found is None

    def change(self, frame: _Frame, new: Node) -> None:
        """Put another node in the place of a frame's. Raises OptimizerError where it has been there before."""
        if new.digest in frame.seen:
            since = self.steps[frame.seen[new.digest] :]
            rules = dict.fromkeys(step.rule for step in since)
            raise OptimizerError(
                f"pass {self.name!r}: {_names(rules)} {'goes' if len(rules) == 1 else 'go'} round in a circle at "
                f"{short_path(frame.place.path())}: after {len(since)} rewrites the {type(new).__name__} is what it "
                "was; at least one of these laws must be written in one direction only"
            )
        frame.seen[new.digest] = len(self.steps)
        frame.node = new

    def check_budget(self, step: Step, new: Node) -> None:
        """Stop rules that never end. Raises OptimizerError that names those that fired most of late."""
        if self.budget is None:
            if len(self.steps) <= _FREE_STEPS and len(children(new)) <= _FREE_STEPS:
                return
            self.budget = _FREE_STEPS + _STEPS_PER_NODE * _num_nodes(self.root)
        if len(self.steps) <= self.budget and len(children(new)) <= max(self.budget, _FREE_STEPS):
            return
        late = dict(Counter(late.rule for late in self.steps[-100:]).most_common(3))
        raise OptimizerError(
            f"pass {self.name!r} does not come to rest: {len(self.steps):,} rewrites of a query of "
            f"{_num_nodes(self.root):,} nodes, {self.budget:,} allowed, and {_names(late)} still "
            f"{'applies' if len(late) == 1 else 'apply'}, last at {short_path(step.path)}; a law must make something "
            "smaller"
        )


def _first(node: Node, table: Mapping[type[Node], RuleSet]) -> tuple[Rule, Node] | None:
    """The first rule that applies to a node, and what it makes of it."""
    for rule in table.get(type(node), ()):
        if (new := rule(node)) is not None:
            return rule, new
    return None


def _names(rules: Mapping[str, int | None]) -> str:
    return ("rule " if len(rules) == 1 else "rules ") + ", ".join(map(repr, rules))


def _num_nodes(root: Node) -> int:
    """The size of a tree; what equal subtrees share is counted once."""
    seen = {root.digest}
    stack = [root]
    num_nodes = 1
    while stack:
        below = children(stack.pop())
        num_nodes += len(below)
        for child in below:
            if child.digest not in seen:
                seen.add(child.digest)
                stack.append(child)
    return num_nodes
