"""Each law on its own: golden pairs as text, and the table of all laws."""

from __future__ import annotations

import re

import pytest
from optimizer.golden_rules import PAIRS, Pair
from strategies import shelf

from spanflow.errors import QueryError
from spanflow.ir.denotation import denote
from spanflow.ir.nodes import Chat, Commute, Generate, Node, Seq, Text
from spanflow.ir.text import from_text, to_text
from spanflow.ir.verify import verify
from spanflow.ir.walk import preorder
from spanflow.optimizer.driver import rewrite
from spanflow.optimizer.passes import DEFAULT
from spanflow.optimizer.rule import Rule, by_kind, kinds_of, law_of

RULES = {rule.__name__: rule for each in DEFAULT for rule in each.rules}
AT_ROOT = {rule.__name__: rule for each in DEFAULT for rule in each.at_root}
NAMES = {"shelf": shelf}


def applied(name: str, root: Node) -> Node:
    """The tree after one rule, wherever it applies."""
    if name in RULES:
        return rewrite(root, (RULES[name],)).root
    return rewrite(root, (), at_root=(AT_ROOT[name],)).root


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_golden(pair: Pair) -> None:
    name = pair.name.partition(":")[0]
    before = from_text(pair.before, retrievers=NAMES)
    if pair.after.startswith("error: "):
        with pytest.raises(QueryError, match=f"^{re.escape(pair.after.removeprefix('error: '))}"):
            applied(name, before)
        return
    expected = before if pair.after == "unchanged" else from_text(pair.after, retrievers=NAMES)
    after = applied(name, before)
    assert to_text(after, retrievers=NAMES) == to_text(expected, retrievers=NAMES)
    verify(after)
    if name != "judge_tree":
        assert denote(after) == denote(before)


def test_each_rule_has_cases_in_which_it_applies_and_in_which_it_does_not() -> None:
    for name in RULES | AT_ROOT:
        outcomes = [pair.after == "unchanged" for pair in PAIRS if pair.name.startswith(f"{name}:")]
        assert set(outcomes) == {True, False}, name


LAWS = """
bare_text        G("a") = G(U("a"))                                    Generate
chat             C[m, ...] = G(✶[m, ...])                              Chat
drop_units       ✶["", a] = ✶[a]                                       Seq, Commute, Message
flatten_commute  +[a, +[b, c]] = +[a, b, c]                            Commute
flatten_message  U[a, ✶[b, c]] = U[a, b, c]                            Message
flatten_seq      ✶[a, ✶[b, c]] = ✶[a, b, c]                            Seq
judge_tree       G(+[a, b, c, d], tree) = G(+[G(+[a, b]), G(+[c, d])]) Generate
no_operands      ✶[] = ""                                              Seq
no_separator     +[U, ..., separator] = +[U, ...]                      Commute
no_text          F"" = "", at the root                                 Fragment
only_commute     +[+[a, b]] = +[a, b]                                  Commute
single_commute   +[a] = a                                              Commute
single_query     G(✶[a]) = G(a)                                        Generate
single_root      ✶[a] = a, at the root                                 Seq
single_seq       ✶[a] = a                                              Seq
"""


def test_the_table_of_laws() -> None:
    rows = [law_of(rule) for _, rule in sorted((RULES | AT_ROOT).items())]
    table = "\n".join(f"{row.rule:<16} {row.law:<53} {', '.join(row.kinds)}" for row in rows)
    print(table)
    assert table == LAWS.strip()


def test_rules_are_looked_up_by_the_kind_in_their_annotation() -> None:
    def both(node: Seq | Commute) -> Node | None:
        """`a = b`"""
        return None

    def any_node(node: Node) -> Node | None:
        """`a = b`"""
        return None

    table = by_kind((both, any_node))
    assert table[Seq] == table[Commute] == (both, any_node)
    assert table[Text] == table[Chat] == (any_node,)


def test_what_is_no_rule_is_refused() -> None:
    def of_text(node: str) -> Node | None:
        """`a = b`"""
        return None

    def lawless(node: Generate) -> Node | None:
        """Does something."""
        return None

    with pytest.raises(TypeError, match=r"rule 'of_text': its argument is annotated with <class 'str'>, which is no"):
        kinds_of(of_text)
    with pytest.raises(TypeError, match="rule 'lawless': the first line of its docstring must be its law"):
        law_of(lawless)


def test_rules_leave_alone_what_they_have_made() -> None:
    """A rule of the table is no longer applicable anywhere in what came out of its golden pairs."""
    for pair in PAIRS:
        name = pair.name.partition(":")[0]
        if name in RULES and not pair.after.startswith(("error", "unchanged")):
            rule: Rule = RULES[name]
            after = from_text(pair.after, retrievers=NAMES)
            assert all(rule(node) is None for _, node in preorder(after) if isinstance(node, kinds_of(rule)))
