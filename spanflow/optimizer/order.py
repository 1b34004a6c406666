"""In which order the operands of an exact commute stand.

Operands commute, so any order has the meaning that the author wrote. Spans are found wherever they stand; an exact
commute makes no spans, and only an order that comes again hits the prefix cache. So exact commutes are put in order,
and no others.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from hashlib import blake2b
from threading import Lock
from typing import NamedTuple, Protocol

from spanflow.errors import OptimizerError
from spanflow.ir.fidelity import EXACT, Rung
from spanflow.ir.nodes import Chat, Commute, Generate, Message, Node
from spanflow.ir.walk import LEAVES, children, holds, is_answer, with_children
from spanflow.optimizer.trace import Place, Step


class OrderHint(Protocol):
    """Knows which orders the engine's prefix cache is likely to hold.

    A session takes one as `order_hint`, `optimise` as `hint`. It is asked while queries are compiled, by several
    threads at once.
    """

    def order(self, operands: Sequence[Node], head: bytes) -> Sequence[int]:
        """The order in which to put these operands, as their indices, each once.

        The operands come in their canonical order, and equal operands have equal digests. `head` stands for all that
        precedes them in the prompt: where it is equal, so is what precedes them.
        """


def canonical_order(operands: Sequence[Node], generated: dict[bytes, bool] | None = None) -> list[int]:
    """The indices of operands in an order that depends on nothing but the operands themselves.

    Those in which something is generated come last: no two runs share what follows them. `generated` remembers in
    which that is, for further calls.
    """
    known = {} if generated is None else generated
    keys = [(holds(operand, is_answer, known), operand.digest) for operand in operands]
    return sorted(range(len(operands)), key=keys.__getitem__)


class RecentOrders:
    """An `OrderHint` that remembers the orders which it gave last.

    Operands come in the order of that remembered prompt which shares the longest beginning with what can be said now;
    the rest follow in canonical order. It is for one engine. `capacity` is the number of remembered orders: about as
    many prompts as the prefix cache holds.

    >>> from spanflow import Session
    >>> from spanflow.optimizer.order import RecentOrders
    >>> session = Session(rung="exact", order_hint=RecentOrders(capacity=64))
    """

    def __init__(self, capacity: int = 256) -> None:
        self._recent: deque[tuple[bytes, tuple[bytes, ...]]] = deque(maxlen=capacity)
        self._lock = Lock()

    def order(self, operands: Sequence[Node], head: bytes) -> list[int]:
        """See `OrderHint.order`; remembers the answer."""
        with self._lock:
            return self._order(operands, head)

    def _order(self, operands: Sequence[Node], head: bytes) -> list[int]:
        places: dict[bytes, list[int]] = {}
        for index in range(len(operands) - 1, -1, -1):
            if not holds(operands[index], is_answer):
                places.setdefault(operands[index].digest, []).append(index)
        best: tuple[bytes, ...] = ()
        for known_head, digests in reversed(self._recent):
            if known_head == head and len(digests) > len(best):
                best = max(best, _usable(digests, places), key=len)
        chosen = [places[digest].pop() for digest in best]
        order = chosen + sorted(set(range(len(operands))) - set(chosen))
        given = (head, tuple(operands[index].digest for index in order))
        if given in self._recent:
            self._recent.remove(given)
        self._recent.append(given)
        return order


def order_exact(
    root: Node,
    *,
    rung: Rung | None = None,
    hint: OrderHint | None = None,
    name: str = "order",
    listener: Callable[[Step], None] | None = None,
) -> tuple[Node, tuple[Step, ...]]:
    """Put the operands of exact commutes in order: as the hint says, or in canonical order.

    A commute is exact where its author says so, or says nothing and the session's `rung` is exact. What stands in a
    span keeps its order. Raises OptimizerError where the hint gives no order of the operands.
    """
    if not _may_have_exact(root, rung):
        return root, ()
    steps: list[Step] = []
    generated: dict[bytes, bool] = {}
    results: list[Node] = []
    stack = [_Visit(root, Place(), _Above())]
    while stack:
        visit = stack.pop()
        node, place, above, opened = visit
        if opened is None:
            inner = visit.below(rung)
            stack.append(visit._replace(opened=[each.place.number for each in inner]))
            stack += reversed(inner)
            continue
        below = list(children(node))
        for number in reversed(opened):
            below[number] = results.pop()
        new = with_children(node, below)
        if isinstance(new, Commute) and above.is_exact(new, rung) and len(new.operands) > 1:
            ordered = _ordered(new, place, hint, generated)
            if ordered.digest != new.digest:
                steps.append(Step(name, "order", place, new.digest, ordered.digest))
                if listener is not None:
                    listener(steps[-1])
                new = ordered
        results.append(new)
    return results[0], tuple(steps)


class _Above(NamedTuple):
    """What stands above: the rung of the commutes of which a node is directly an operand, and whether it is in a
    span."""

    rung: Rung | None = None
    in_span: bool = False

    def is_exact(self, commute: Commute, session: Rung | None) -> bool:
        return not self.in_span and (commute.rung or self.rung or session) == EXACT

    def below(self, node: Node, session: Rung | None) -> tuple[_Above, _Above]:
        """What stands above the children of a node: of those that are no commutes, and of those that are."""
        match node:
            case Generate() | Chat():
                inner = _Above()
                return inner, inner
            case Commute():
                inner = _Above(None, not self.is_exact(node, session))
                return inner, _Above(node.rung or self.rung, self.in_span)
            case _:
                inner = _Above(None, self.in_span)
                return inner, inner


class _Visit(NamedTuple):
    """A node on the way to its ordered form; `opened` are the numbers of the children that are visited before it."""

    node: Node
    place: Place
    above: _Above
    opened: list[int] | None = None

    def below(self, rung: Rung | None) -> list[_Visit]:
        """The children that may be or hold commutes; texts and messages of nothing else, most of a tree, do not."""
        others, commutes = self.above.below(self.node, rung)
        return [
            _Visit(child, Place(self.place, self.node, number), commutes if type(child) is Commute else others)
            for number, child in enumerate(children(self.node))
            if not (type(child) in LEAVES or (type(child) is Message and LEAVES.issuperset(map(type, child.parts))))
        ]


def _ordered(commute: Commute, place: Place, hint: OrderHint | None, generated: dict[bytes, bool]) -> Node:
    operands = [commute.operands[index] for index in canonical_order(commute.operands, generated)]
    if hint is not None:
        order = list(hint.order(operands, _head(place)))
        if sorted(order) != list(range(len(operands))):
            raise OptimizerError(
                f"{place.path()}: {type(hint).__name__}.order gave {order} for {len(operands)} operands; it must give "
                "each index once"
            )
        operands = [operands[index] for index in order]
    return with_children(commute, operands)


def _head(place: Place) -> bytes:
    """A digest of what precedes a node in the prompt that it is part of."""
    hasher = blake2b(b"head", digest_size=16)
    above: Place | None = place
    while above is not None and above.parent is not None and not isinstance(above.parent, Generate | Chat):
        if isinstance(above.parent, Commute):
            hasher.update(f"+{above.number}".encode())
        for sibling in children(above.parent)[: above.number]:
            hasher.update(sibling.digest)
        hasher.update(type(above.parent).__name__.encode())
        above = above.above
    return hasher.digest()


def _usable(digests: Sequence[bytes], places: dict[bytes, list[int]]) -> tuple[bytes, ...]:
    """The beginning of a remembered order that can be had with these operands."""
    left = Counter({digest: len(indices) for digest, indices in places.items()})
    for number, digest in enumerate(digests):
        if not left[digest]:
            return tuple(digests[:number])
        left[digest] -= 1
    return tuple(digests)


def _may_have_exact(root: Node, rung: Rung | None) -> bool:
    """Whether there is any commute that could be exact: a quick look, since most trees have none."""
    stack = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, Commute) and (node.rung or rung) == EXACT:
            return True
        stack += [child for child in children(node) if type(child) not in LEAVES]
    return False
