"""Drawings name every node, keep their width, and no text can draw anything itself."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import queries, shelf, texts

from spanflow.ir.draw import tree_mermaid, tree_svg, tree_text
from spanflow.ir.fidelity import repair
from spanflow.ir.nodes import Chat, Commute, Fragment, Generate, Message, Node, Retrieve, Sampling, Seq, Text
from spanflow.ir.walk import preorder

JUDGE = Generate(
    Seq(
        (
            Message("system", (Text("Pick one.\n"),)),
            Commute(
                (
                    Generate(Message("user", (Text("A name?"),)), Sampling(temperature=0.7, stop=("\n", '"')), n=3),
                    Message("assistant", (Fragment("x" * 1200, "d1"),)),
                    Retrieve(shelf, "names", 2),
                ),
                repair(16),
                "head",
                True,
                " | ",
            ),
            Chat((Message("user", (Text("Which?"),)),), Sampling(seed=4)),
        )
    ),
    Sampling(max_tokens=64, schema='{"type":"object"}'),
    model="small",
    reduce="tree",
)


def test_tree_text() -> None:
    assert tree_text(JUDGE, 60).splitlines() == [
        'G model=small reduce=tree arity=2 max_tokens=64 schema={"ty…',
        "└─ ✶",
        "   ├─ S",
        '   │  └─ "Pick one.\\n"',
        '   ├─ + repair(16) head associative separator=" | "',
        '   │  ├─ G n=3 temperature=0.7 stop="\\n","\\""',
        "   │  │  └─ U",
        '   │  │     └─ "A name?"',
        "   │  ├─ A",
        '   │  │  └─ F d1 "xxxxxxxxxxxxxxxxxxxxxxxxxxxx…" 1,200 chars',
        '   │  └─ R shelf k=2 "names"',
        "   └─ C seed=4",
        "      └─ U",
        '         └─ "Which?"',
    ]


def test_tree_mermaid() -> None:
    root = Generate(Commute((Text('say "no"'), Fragment("f", "<b>"))), Sampling(max_tokens=4))
    assert tree_mermaid(root).splitlines() == [
        "flowchart TD",
        '    n0["G max_tokens=4"]',
        '    n1(["+"])',
        '    n2["#34;say #92;#34;no#92;#34;#34;"]',
        '    n3["F #60;b#62; #34;f#34;"]',
        "    n0 --> n1",
        "    n1 --> n2",
        "    n1 --> n3",
    ]


@given(queries(), st.integers(24, 120))
def test_one_printable_line_a_node_within_the_width(root: Node, width: int) -> None:
    lines = tree_text(root, width).split("\n")
    assert len(lines) == sum(1 for _ in preorder(root))
    assert max(map(len, lines)) <= width
    assert all(line.isprintable() for line in lines)


@given(queries())
def test_mermaid_has_a_line_for_each_node_and_each_edge(root: Node) -> None:
    lines = tree_mermaid(root).split("\n")
    count = sum(1 for _ in preorder(root))
    assert len(lines) == 2 * count
    nodes, edges = lines[1 : count + 1], lines[count + 1 :]
    for number, line in enumerate(nodes):
        assert re.fullmatch(rf'    n{number}(\["[^"<>\[\]{{}}`]*"\]|\(\["[^"<>\[\]{{}}`]*"\]\))', line), line
    for line in edges:
        assert re.fullmatch(r"    n\d+ --> n\d+", line)
    assert sorted(int(line.rsplit("n", 1)[1]) for line in edges) == list(range(1, count))


@given(texts())
def test_short_texts_are_shown_whole(text: str) -> None:
    shown = tree_text(Text(text), 300)
    assert re.sub(r'\\(?:u.{4}|U.{8}|[nrt"\\])', lambda found: meaning(found[0]), shown) == f'"{text}"'


def meaning(escape: str) -> str:
    return (
        chr(int(escape[2:], 16)) if escape[1] in "uU" else {"n": "\n", "r": "\r", "t": "\t"}.get(escape[1], escape[1])
    )


def test_a_deep_tree_is_drawn_with_levels_as_numbers() -> None:
    root: Node = Text("leaf")
    for _ in range(5_000):
        root = Seq((root,))
    lines = tree_text(root, 60).split("\n")
    assert lines[-1] == '[level 5000] "leaf"'
    assert lines[10] == " " * 27 + "└─ ✶"
    assert lines[11] == "[level 11] ✶"
    assert tree_mermaid(root).endswith("n4999 --> n5000")


@pytest.mark.parametrize("width", [-1, 0, 24])
def test_a_senseless_width_is_the_smallest(width: int) -> None:
    assert tree_text(JUDGE, width) == tree_text(JUDGE, 24)


def svg_rows(picture: str) -> list[str]:
    """The texts of a picture, which is parsed as a reader of XML would."""
    return [element.text or "" for element in ElementTree.fromstring(picture) if element.tag.endswith("text")]


def test_tree_svg() -> None:
    picture = tree_svg(Generate(Message("user", (Commute((Text("a <b>"), Text("c"))), Text("Which?")))))
    assert svg_rows(picture) == ["G", "U", "+", '"a <b>"', '"c"', '"Which?"']
    assert 'd="M12 20V32H25M32 40V52H45M52 60V72H65M52 60V92H65M32 40V112H45"' in picture
    assert 'height="126"' in picture


@given(queries())
def test_a_picture_has_a_row_for_each_node(root: Node) -> None:
    rows = svg_rows(tree_svg(root, max_rows=10**6))
    assert len(rows) == sum(1 for _ in preorder(root))
    assert all(len(row) <= 90 for row in rows)


def test_large_and_deep_trees_are_drawn_in_part() -> None:
    wide = Commute(tuple(Text(str(i)) for i in range(500)))
    assert svg_rows(tree_svg(wide, max_rows=10))[-2:] == ['"8"', "… and 491 more"]
    deep: Node = Text("bottom")
    for _ in range(5_000):
        deep = Seq((deep, Text("beside")))
    rows = svg_rows(tree_svg(deep))
    assert len(rows) == 201
    assert rows[21] == "[level 21] ✶"
    assert rows[-1] == "… and 9,801 more"
