"""Checks of answers that are not what they could be: typed again, left out, out of the reach of spans."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spanflow.ir.nodes import Generate
from spanflow.optimizer.lint.finding import Found, Limits
from spanflow.optimizer.lint.reading import Answer, Reading
from spanflow.optimizer.rules.judge_tree import why_no_tree

_NODE = re.compile(r"<(?:Text|Fragment|Message|Seq|Commute|Generate|Retrieve|Chat) [0-9a-f]{8}>")
_PLACEHOLDER = re.compile(
    r"(?<![{$\\\w])\{\s*(?:answers?|candidates?|responses?|completions?|outputs?|documents?|docs?|passages?|contexts?|"
    r"questions?|quer(?:y|ies)|prompts?|user_input|history)(?:_?\d+|\[[^\]{}]*\]|_text|\.\w+)?\s*\}(?!\})",
    re.I,
)


def holds_node(reading: Reading, limits: Limits) -> Iterator[Found]:
    """A node of a query that was formatted into text."""
    for said in reading.texts:
        if found := _NODE.search(said.text):
            yield (
                said.place,
                f"{found[0]!r} is how a node prints itself: it was formatted into the text, where it means nothing",
                "put the node itself beside the text, as in seq(user('...'), node)",
            )


def holds_placeholder(reading: Reading, limits: Limits) -> Iterator[Found]:
    """A placeholder of a template that nothing was put into."""
    for said in reading.texts:
        if not said.is_fragment and (found := _PLACEHOLDER.search(said.text)):
            yield (
                said.place,
                f"{found[0]!r} looks like a placeholder that nothing was put into; is the f before the string missing?",
                "fill it in; put an answer in as a node, so that it is taken over as it was sampled",
            )


def retypes_answer(reading: Reading, limits: Limits) -> Iterator[Found]:
    """An answer that is given as text among answers that are generated."""
    generated = {answer.group for answer in reading.answers if answer.group is not None}
    for said in reading.texts:
        if said.role == "assistant" and said.group in generated and said.text.strip():
            yield (
                said.place,
                "an answer is written out among the generated ones of its commute: if a model gave it, its text is "
                "tokenised and computed again, and may not be what was sampled",
                "put the generate that gave it in its place",
            )


def orders_candidates(reading: Reading, limits: Limits) -> Iterator[Found]:
    """Answers one after the other in an ordered join."""
    row: list[Answer] = []
    for part in [*reading.parts, None]:
        if isinstance(part, Answer) and part.group is None:
            row.append(part)
            continue
        if len(row) > 1:
            yield (
                row[0].place,
                f"{len(row)} answers follow each other in an ordered join, so each has to be computed again behind "
                "those before it",
                "if their order does not matter, join them with commute(...), which takes them over as spans",
            )
        row = []


def cannot_be_tree(reading: Reading, limits: Limits) -> Iterator[Found]:
    """A judge that is to be a tree, and cannot be one."""
    node = reading.node
    if isinstance(node, Generate) and node.reduce is not None and (reason := why_no_tree(node)):
        what, _, fix = reason.partition("; ")
        yield reading.place, f"reduce='tree': {what}", fix
