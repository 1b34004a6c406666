"""The tree of one generation to what the engine is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from spanflow.ir.fidelity import Anchor, Rung
from spanflow.ir.nodes import Node
from spanflow.lowering.conversation import Generated, converse
from spanflow.lowering.layout import Layout, Mark, Piece, lay_out
from spanflow.lowering.pieces import Run, num_shared
from spanflow.lowering.prompt import NO_ANCHOR, Span, SpanPrompt
from spanflow.lowering.rendering import take_apart
from spanflow.lowering.template import ChatTemplate

__all__ = ["Generated", "Lowered", "SpanSource", "lower"]


@dataclass(frozen=True, slots=True)
class SpanSource:
    """Where a span of a prompt comes from: the tree path of its operand, and how it is computed.

    `anchor` is 'prompt' for an answer: the prompt that produced it.
    """

    path: str
    kind: Literal["text", "generated"]
    rung: Rung
    anchor: Literal["header", "head", "none", "prompt"]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Lowered:
    """The prompt of one generation, and what there is to say about it.

    `sources` has one entry for each span of the prompt. `num_tokens_differing` counts the tokens that are other than
    in a tokenisation of the whole text in one go; 0 means that the cuts between spans change nothing.
    """

    prompt: SpanPrompt
    sources: tuple[SpanSource, ...]
    num_tokens_differing: int
    notes: tuple[str, ...]


def lower(
    query: Node,
    template: ChatTemplate,
    *,
    generated: Mapping[str, tuple[Generated, ...]],
    rung: Rung | None,
    anchor: Anchor,
    path: str = "$.query",
) -> Lowered:
    """Turn the operand of one generate, which stands at `path`, into token ids and spans over them.

    `query` has no retrieve left in it. `generated` has the candidates of each inner generate or chat by its path.
    `rung` and `anchor` hold where a commute does not say otherwise; a `rung` of None is repair(32) for text, and moved
    for generated answers, which are taken over behind the prompt that produced them. Raises QueryError, naming the
    path, for a query that cannot be a prompt of this template.
    """
    conversation = converse(query, generated=generated, rung=rung, anchor=anchor, path=path, end_ids=template.end_ids)
    rendering = take_apart(template, conversation.turns, path)
    layout = lay_out(template, conversation, rendering, path)
    return _assemble(template, layout, path)


@dataclass(slots=True)
class _Placed:
    """Where the pieces of one mark came to stand. `num_opening`: how many of its tokens precede the answer.
    `num_closing`: how many tokens right before it are the template's own."""

    start: int
    end: int
    num_opening: int = 0
    num_closing: int = 0


def _assemble(template: ChatTemplate, layout: Layout, path: str) -> Lowered:
    """Tokenise unit by unit, and put spans over what the marks cover."""
    ids: list[int] = []
    placed: dict[int, _Placed] = {}
    group_starts: dict[int, int] = {}
    live = {mark.operand.group for mark in layout.marks}
    num_differing = 0
    before: str | None = None  # the text that the unit before ended with
    num_closing = 0
    for unit in _units(layout.pieces, live):
        first = unit[0]
        start = len(ids)
        if first.group is not None:
            group_starts.setdefault(first.group, start)
        if first.token_ids is not None:
            ids += first.token_ids
            before = None
        else:
            where = next((piece.path for piece in unit if piece.path), path)
            runs = [Run(piece.text, piece.is_data) for piece in unit]
            encoded = template.pieces.encode(runs, is_first=not start, where=where)
            ids += encoded.token_ids
            if before is not None:
                num_differing += template.pieces.num_differing(before, encoded.first)
            before = encoded.last
        if first.mark is not None:
            here = placed.setdefault(first.mark, _Placed(start, start, num_closing=num_closing))
            here.end = len(ids)
            if first.token_ids is not None:
                here.num_opening = start - here.start
        is_template = first.mark is None and not any(piece.is_data or piece.token_ids for piece in unit)
        num_closing = num_closing + len(ids) - start if is_template else 0
    spans, sources = _spans(template, layout.marks, placed, group_starts, tuple(ids))
    return Lowered(SpanPrompt(tuple(ids), spans), sources, num_differing, layout.notes)


def _units(pieces: Sequence[Piece], live: set[int]) -> Iterator[list[Piece]]:
    """Runs of pieces that are tokenised in one go: cut around ids and spans, and where a commute with spans begins."""
    numbers: list[int] = []
    before: Piece | None = None
    for piece in pieces:
        is_cut = before is None or (
            piece.token_ids is not None
            or before.token_ids is not None
            or piece.mark != before.mark
            or (piece.group != before.group and piece.group in live)
        )
        numbers.append((numbers[-1] if numbers else 0) + is_cut)
        before = piece
    for _, unit in groupby(zip(numbers, pieces, strict=True), key=lambda pair: pair[0]):
        yield [piece for _, piece in unit]


def _spans(
    template: ChatTemplate,
    marks: Sequence[Mark],
    placed: Mapping[int, _Placed],
    group_starts: Mapping[int, int],
    ids: tuple[int, ...],
) -> tuple[tuple[Span, ...], tuple[SpanSource, ...]]:
    spans: list[Span] = []
    sources: list[SpanSource] = []
    heads: dict[int, SpanPrompt] = {}
    for number in sorted(placed, key=lambda number: placed[number].start):
        mark, here = marks[number], placed[number]
        operand = mark.operand
        # The head of a prompt and its last token are always computed in context.
        start, end = max(here.start, 1), min(here.end, len(ids) - 1)
        if operand.group not in heads:
            at = max(group_starts[operand.group], 1)
            heads[operand.group] = SpanPrompt(ids[:at], tuple(spans))
        if mark.answer is None:
            rung, num_taken = operand.rung, None
            name: Literal["header", "head", "none", "prompt"] = operand.anchor
            behind = _text_anchor(template, mark, heads[operand.group])
        else:
            rung, name = operand.answer_rung, "prompt"
            answer_start = here.start + here.num_opening
            if not answer_start:
                continue
            opening = start
            if spans and spans[-1].end == here.start - here.num_closing and not rung.num_tokens:
                # Between two answers: the end of the last turn stands before the inner prompt's header as well, and
                # what comes from there need not be computed here.
                opening = spans[-1].end
            num_taken = _num_shared(mark.answer.prompt, ids[opening:answer_start])
            start = answer_start - num_taken
            behind = _without_last(mark.answer.prompt, num_taken)
        if end - start <= (num_taken or 0):
            continue
        repair = min(rung.num_tokens, end - start)
        spans.append(Span(start, end, behind, repair, num_taken))
        sources.append(
            SpanSource(operand.path, "text" if mark.answer is None else "generated", rung, name, end - start)
        )
    return tuple(spans), tuple(sources)


def _text_anchor(template: ChatTemplate, mark: Mark, head: SpanPrompt) -> SpanPrompt:
    match mark.operand.anchor:
        case "header":
            return SpanPrompt(template.header(mark.role))
        case "head":
            return head
        case "none":
            return NO_ANCHOR


def _num_shared(inner: SpanPrompt, opening: tuple[int, ...]) -> int:
    """How many ids of an answer's opening are also the end of the prompt that produced it, outside of its spans."""
    behind_spans = inner.token_ids[inner.spans[-1].end if inner.spans else 0 :]
    return num_shared(behind_spans[::-1], opening[::-1])


def _without_last(prompt: SpanPrompt, num_tokens: int) -> SpanPrompt:
    return SpanPrompt(prompt.token_ids[: len(prompt) - num_tokens], prompt.spans)
