"""What a rule is: a small pure function whose docstring is its law, and whose argument's type says where it looks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol, get_args, get_type_hints

from spanflow.ir.nodes import Node, Query

_KINDS: tuple[type[Node], ...] = get_args(Query)


class Rule(Protocol):
    """`rule(node)` is the node that a law puts in its place, or None where the law does not apply.

    The annotation of its one argument is the kind of node that it is asked about (or a union of them). The first line
    of its docstring is the law, as in `✶[a] = a`. It keeps no state, and its result depends on the node alone.
    """

    __name__: str

    def __call__(self, node: Any, /) -> Node | None:
        """Rewrite one node, or leave it."""


#: Rules in the order in which they are tried; sets add.
RuleSet = tuple[Rule, ...]


class Law(NamedTuple):
    """A row of the table of laws."""

    rule: str
    law: str
    kinds: tuple[str, ...]


def kinds_of(rule: Rule) -> tuple[type[Node], ...]:
    """The kinds of nodes that a rule is asked about, from its annotation. Raises TypeError where there is none."""
    hints = get_type_hints(rule)
    hints.pop("return", None)
    wanted = next(iter(hints.values()), None)
    if wanted is Node:
        return _KINDS
    kinds = get_args(wanted) or (wanted,)
    if not all(kind in _KINDS for kind in kinds):
        raise TypeError(f"rule {rule.__name__!r}: its argument is annotated with {wanted!r}, which is no kind of node")
    return kinds


def law_of(rule: Rule) -> Law:
    """A rule as a row of the table of laws. Raises TypeError where its docstring has no law."""
    law = (rule.__doc__ or "").strip().partition("\n")[0].strip("`. ")
    if " = " not in law:
        raise TypeError(f"rule {rule.__name__!r}: the first line of its docstring must be its law, as in `✶[a] = a`")
    return Law(rule.__name__, law, tuple(kind.__name__ for kind in kinds_of(rule)))


@cache
def by_kind(rules: RuleSet) -> Mapping[type[Node], RuleSet]:
    """The rules to try on each kind of node, in their order."""
    table: dict[type[Node], RuleSet] = {}
    for rule in rules:
        for kind in kinds_of(rule):
            table[kind] = (*table.get(kind, ()), rule)
    return table
