"""All small trees of joins: what is wrong with a law mostly shows in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

from spanflow.ir.nodes import Node

Join = Callable[[tuple[Node, ...]], Node]


def small_trees(leaves: Sequence[Node], joins: Sequence[Join], most: int) -> Iterator[Node]:
    """Each tree of these leaves and joins with up to `most` nodes."""
    of_size: list[list[Node]] = [[], list(leaves)]
    for size in range(2, most + 1):
        below = [operands for sizes in _sums(size - 1) for operands in product(*(of_size[one] for one in sizes))]
        of_size.append([join(operands) for operands in below for join in joins])
    for trees in of_size:
        yield from trees


def _sums(total: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as a sum of positive ones, in any order."""
    if total == 0:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in _sums(total - first))
