"""Pictures of a tree: indented text for terminals, Mermaid and SVG for notebooks and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from html import escape
from typing import Any, assert_never

from spanflow.ir.nodes import (
    DEFAULT_SEPARATOR,
    Chat,
    Commute,
    Fragment,
    Generate,
    Message,
    Node,
    Query,
    Retrieve,
    Sampling,
    Seq,
    Text,
)
from spanflow.ir.walk import children

_MIN_WIDTH = 24
_MERMAID_WIDTH = 48
_SVG_WIDTH = 72
_ROW_HEIGHT = 20
#: Levels that a picture indents.
_MAX_LEVELS = 20
_ROLE_SYMBOL = {"system": "S", "user": "U", "assistant": "A"}
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_ESCAPES_IN_QUOTES = _ESCAPES | {'"': '\\"', "\\": "\\\\"}


def tree_text(root: Node, max_width: int = 100) -> str:
    """The tree, one node a line: its operator, its options that are not the default, the beginning of its text.

    Lines have at most `max_width` characters (24 at least). Nodes too deep to be indented in half of that show
    their level as a number. Characters that a terminal might act on are escaped.

    >>> from spanflow import commute, fragment, generate, user
    >>> from spanflow.ir.draw import tree_text
    >>> documents = commute(fragment("The sky.", id="d1"), fragment("The sea.", id="d2"), rung="moved")
    >>> print(tree_text(generate(user(documents, "What is blue?"), max_tokens=8)))
    G max_tokens=8
    └─ U
       ├─ + moved
       │  ├─ F d1 "The sky."
       │  └─ F d2 "The sea."
       └─ "What is blue?"
    """
    width = max(max_width, _MIN_WIDTH)
    lines: list[str] = []
    stack: list[tuple[Node, str, str, int]] = [(root, "", "", 0)]
    while stack:
        node, lead, indent, depth = stack.pop()
        lines.append(_cut(lead + _label(node, width - len(lead)), width))
        below = children(node)
        if 3 * (depth + 1) > width // 2:
            stack.extend((child, f"[level {depth + 1}] ", "", depth + 1) for child in reversed(below))
            continue
        for i in range(len(below) - 1, -1, -1):
            branch, rail = ("├─ ", "│  ") if i < len(below) - 1 else ("└─ ", "   ")
            stack.append((below[i], indent + branch, indent + rail, depth + 1))
    return "\n".join(lines)


def tree_mermaid(root: Node) -> str:
    """The tree as a Mermaid flowchart, top down. Texts are shortened, and none can end a label or add a node."""
    lines = ["flowchart TD"]
    edges: list[str] = []
    stack: list[tuple[Node, int | None]] = [(root, None)]
    while stack:
        node, parent = stack.pop()
        number = len(lines) - 1
        label = _entities(_label(node, _MERMAID_WIDTH))
        lines.append(f'    n{number}(["{label}"])' if isinstance(node, Commute) else f'    n{number}["{label}"]')
        if parent is not None:
            edges.append(f"    n{parent} --> n{number}")
        stack.extend((child, number) for child in reversed(children(node)))
    return "\n".join(lines + edges)


def tree_svg(root: Node, max_rows: int = 200) -> str:
    """The tree as an SVG picture, one node a row; of a larger one the first `max_rows`, and how many are left out.

    Texts are shortened, and none can end an element.
    """
    rows: list[str] = []
    rails: list[str] = []
    num_left_out = 0
    stack: list[tuple[Node, int, int | None]] = [(root, 0, None)]
    while stack:
        node, depth, parent = stack.pop()
        if len(rows) == max_rows:
            num_left_out += 1
        else:
            number = len(rows)
            x, y = _ROW_HEIGHT * min(depth, _MAX_LEVELS), _ROW_HEIGHT * number
            level = f"[level {depth}] " if depth > _MAX_LEVELS else ""
            label = _cut(level + _label(node, _SVG_WIDTH), _SVG_WIDTH + len(level))
            bold = ' font-weight="bold"' if isinstance(node, Commute | Generate) else ""
            rows.append(f'<text x="{x + 8}" y="{y + 16}"{bold}>{escape(label)}</text>')
            if parent is not None and depth <= _MAX_LEVELS:
                corner = x - _ROW_HEIGHT + 12
                rails.append(f"M{corner} {_ROW_HEIGHT * parent + 20}V{y + 12}H{x + 5}")
            parent = number
        stack.extend((child, depth + 1, parent) for child in reversed(children(node)))
    if num_left_out:
        rows.append(f'<text x="8" y="{_ROW_HEIGHT * len(rows) + 16}">… and {num_left_out:,} more</text>')
    width, height = 8 * (_SVG_WIDTH + 20) + _ROW_HEIGHT * _MAX_LEVELS // 2, _ROW_HEIGHT * len(rows) + 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="monospace" '
        f'font-size="13"><rect width="100%" height="100%" fill="#fff"/><path d="{"".join(rails)}" fill="none" '
        f'stroke="#999"/>{"".join(rows)}</svg>'
    )


def _label(node: Node, width: int) -> str:
    """Operator, options and text of one node; about `width` characters where a text is shortened."""
    query: Query = node  # type: ignore[assignment]
    match query:
        case Text(text=text):
            return _quoted(text, width)
        case Fragment(text=text, id=name):
            head = "F " if name is None else f"F {_escaped(name, 32)} "
            return head + _quoted(text, width - len(head))
        case Message(role=role):
            return _ROLE_SYMBOL.get(role, "?")
        case Seq():
            return "✶"
        case Commute():
            return _options("+", *_fidelity(query), *_commute_options(query))
        case Generate():
            return _options("G", *_generate_options(query))
        case Retrieve():
            head = _options("R", _retriever_name(query.retriever), *_fidelity(query), _option("k", query.k, None))
            return f"{head} " + _quoted(query.query, width - len(head) - 1)
        case Chat():
            return _options("C", *_sampling_options(query.sampling))
        case _:
            assert_never(query)


def _fidelity(node: Commute | Retrieve) -> list[str]:
    return [str(value) for value in (node.rung, node.anchor) if value is not None]


def _commute_options(node: Commute) -> list[str]:
    separator = "" if node.separator == DEFAULT_SEPARATOR else f"separator={_quoted(node.separator, 24)}"
    return ["associative" if node.associative else "", separator]


def _generate_options(node: Generate) -> list[str]:
    shape = [_option("n", node.n, 1), _option("model", node.model, None), _option("reduce", node.reduce, None)]
    if node.reduce is not None:
        shape.append(f"arity={node.arity}")
    return shape + _sampling_options(node.sampling)


def _sampling_options(sampling: Sampling) -> list[str]:
    return [_option(field.name, getattr(sampling, field.name), field.default) for field in fields(Sampling)]


def _option(name: str, value: object, default: object) -> str:
    if value == default:
        return ""
    shown = ",".join(_quoted(text, 24) for text in value) if isinstance(value, tuple) else _escaped(str(value), 32)
    return f"{name}={shown}"


def _options(symbol: str, *options: str) -> str:
    return " ".join([symbol, *filter(None, options)])


def _retriever_name(retriever: Any) -> str:
    name = getattr(retriever, "__name__", None)
    return _escaped(name if isinstance(name, str) else type(retriever).__name__, 32)


def _quoted(text: str, width: int) -> str:
    """The text in quotes; where that is longer than `width`, its beginning and how many characters it has."""
    whole = _escaped(text, width, _ESCAPES_IN_QUOTES)
    if len(whole) + 2 <= width:
        return f'"{whole}"'
    size = f" {len(text):,} chars"
    return f'"{_escaped(text, width - 2 - len(size), _ESCAPES_IN_QUOTES)}"{size}'


def _escaped(text: str, width: int, escapes: Mapping[str, str] = _ESCAPES) -> str:
    """The text with what a terminal may act on escaped, cut to `width` characters (8 at least) behind an ellipsis."""
    width = max(width, 8)
    head = "".join(escapes.get(c) or (c if c.isprintable() else _code(c)) for c in text[: width + 1])
    return _cut(head, width) if len(head) > width else head


def _code(character: str) -> str:
    number = ord(character)
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 1] + "…"


def _entities(label: str) -> str:
    """Mermaid's numbered entities for all that is neither a letter, a digit nor harmless in a quoted label."""
    return "".join(c if c.isalnum() or c in " .,:=+✶…()-_/" else f"#{ord(c)};" for c in label)
