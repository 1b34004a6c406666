"""Empty text joins to nothing."""

from __future__ import annotations

from spanflow.ir.nodes import Commute, Fragment, Message, Node, Seq, Text
from spanflow.ir.walk import children, with_children
from spanflow.optimizer.rule import RuleSet
from spanflow.optimizer.rules.level import is_unit


def drop_units(node: Seq | Commute | Message) -> Node | None:
    """`✶["", a] = ✶[a]`

    The same in a commute and in a message. A commute of nothing but units is a unit itself; a message without parts
    stays: it is a turn in which nothing is said.
    """
    below = children(node)
    if not any(map(is_unit, below)):
        return None
    kept = [child for child in below if not is_unit(child)]
    return Text("") if isinstance(node, Commute) and not kept else with_children(node, kept)


def no_operands(node: Seq) -> Node | None:
    """`✶[] = ""`"""
    return None if node.operands else Text("")


def no_text(node: Fragment) -> Node | None:
    """`F"" = "", at the root`"""
    return None if node.text else Text("")


UNITS: RuleSet = (drop_units, no_operands)
UNITS_AT_ROOT: RuleSet = (no_text,)
