"""The one driver: a rule set, over a whole tree, until no rule applies anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from spanflow.errors import OptimizerError, QueryError
from spanflow.ir.nodes import Chat, Generate, Message, Node
from spanflow.ir.walk import LEAVES, children, holds, is_answer, with_children
from spanflow.optimizer.rule import Rule, RuleSet, by_kind
from spanflow.optimizer.trace import Place, Step, short_path

#: Rewrites that any query may take, operands that any node may come to have, and how many more of both for each node
#: of the query.
_FREE_STEPS = 5_000
_FREE_WIDTH = 1_000
_PER_NODE = 10
_ASKS: frozenset[type[Node]] = frozenset({Generate, Chat})


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


#: A node, and in the same way that of which it is a child.
_Below: TypeAlias = "tuple[Node, _Below | None]"


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
        self.num_nodes = 0  # of the root; counted when it matters
        self.normal: dict[bytes, Node] = {}
        # What need not be entered: no rule looks at it, nor at anything that may stand below it. A message in which
        # nothing is generated holds neither generates nor chats.
        self.closed = {leaf for leaf in LEAVES if leaf not in self.rules}
        if self.rules.keys() <= _ASKS:
            self.closed.add(Message)
        # What was looked at is known by ids, and so kept alive: in which nodes something is to be done, and what a rule
        # makes of the node itself, where one applies.
        self.looked_at: list[Node] = []
        self.seen: set[int] = set()
        self.at_hand: dict[int, tuple[Rule, Node] | None] = {}

    def run(self) -> Node:
        self.look(self.root)
        stack = [_Frame(Place(), self.root, {self.root.digest: 0})]
        while True:
            frame = stack[-1]
            if frame.below is None:
                self.settle(frame, self.rules if len(stack) > 1 else self.root_rules)
                frame.below, frame.done = children(frame.node), []
            entered = self.find_open(frame)
            if entered is not None:
                stack.append(entered)
                continue
            node = frame.node
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

    def look(self, root: Node) -> None:
        """Find where something is to be done, since in most of a tree nothing is.

        What is below a node to which a rule applies is not looked at yet: the rule may take it along.
        """
        self.looked_at.append(root)
        closed, seen, at_hand, rules = self.closed, self.seen, self.at_hand, self.rules
        stack: list[_Below] = [(root, None)]
        while stack:
            here = stack.pop()
            node = here[0]
            if id(node) not in seen:
                seen.add(id(node))
                try:
                    found = _first(node, rules)
                except QueryError:
                    at_hand[id(node)] = None  # its frame says where it is
                else:
                    if found is not None:
                        at_hand[id(node)] = found
                    else:
                        stack += [
                            (child, here)
                            for child in children(node)
                            if (kind := type(child)) not in closed or (kind is Message and _generates(child))
                        ]
            if id(node) in at_hand:  # so what is above is entered, too
                above = here[1]
                while above is not None and id(above[0]) not in at_hand:
                    at_hand[id(above[0])] = None
                    above = above[1]

    def settle(self, frame: _Frame, table: Mapping[type[Node], RuleSet]) -> None:
        """Apply rules to the node itself, until none does."""
        while True:
            node = frame.node
            found = self.at_hand.get(id(node)) if id(node) in self.seen else None
            if found is None:
                try:
                    found = _first(node, table)
                except QueryError as error:
                    raise QueryError(f"{short_path(frame.place.path())}: {error}") from None
            if found is None:
                return
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
        done, closed, seen, at_hand = frame.done, self.closed, self.seen, self.at_hand
        for index in range(len(done), len(frame.below)):
            child = frame.below[index]
            if (kind := type(child)) in closed and (kind is not Message or not _generates(child)):
                done.append(child)
                continue
            if (known := self.normal.get(child.digest)) is not None:
                done.append(child if known.digest == child.digest else known)
                continue
            if id(child) not in seen:
                self.look(child)
            if id(child) in at_hand:
                return _Frame(Place(frame.place, frame.node, index), child, {child.digest: len(self.steps)})
            done.append(child)
        return None

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
        width = len(children(new))
        if len(self.steps) <= (_FREE_STEPS if self.budget is None else self.budget) and width <= _FREE_WIDTH:
            return
        self.num_nodes = self.num_nodes or _num_nodes(self.root)
        more = _PER_NODE * self.num_nodes
        budget = _FREE_STEPS + more if self.budget is None else self.budget
        if len(self.steps) <= budget and width <= _FREE_WIDTH + more:
            return
        late = dict(Counter(late.rule for late in self.steps[-100:]).most_common(3))
        raise OptimizerError(
            f"pass {self.name!r} does not come to rest: {len(self.steps):,} rewrites of a query of "
            f"{self.num_nodes:,} nodes, {budget:,} allowed, and {_names(late)} still "
            f"{'applies' if len(late) == 1 else 'apply'}, last at {short_path(step.path)} to make a "
            f"{type(new).__name__} of {width:,} operands; a law must make something smaller"
        )


def _first(node: Node, table: Mapping[type[Node], RuleSet]) -> tuple[Rule, Node] | None:
    """The first rule that applies to a node, and what it makes of it."""
    for rule in table.get(type(node), ()):
        if (new := rule(node)) is not None:
            return rule, new
    return None


def _generates(message: Node) -> bool:
    """Whether something is generated inside a message. Most hold leaves alone, which is seen at once."""
    return not LEAVES.issuperset(map(type, children(message))) and holds(message, is_answer)


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
            if type(child) not in LEAVES and child.digest not in seen:
                seen.add(child.digest)
                stack.append(child)
    return num_nodes
