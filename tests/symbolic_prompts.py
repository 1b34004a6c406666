"""Prompts of known shape for the symbolic engine: documents behind a header, and plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from spanflow.lowering.prompt import Span, SpanPrompt

HEADER = (7, 8, 9)
CLOSING = 12
ANSWER = (7, 11)
BLOCK = 16


def start(model_dir: Path, num_blocks: int, **options: Any) -> Any:
    """An engine whose pool has one block less than `num_blocks` to give."""
    from symbolic_engine import SymbolicEngine

    return SymbolicEngine(model_dir, num_blocks, BLOCK, headers=[HEADER], **options)


def other_kv(kind: str) -> Any:
    """A kind of KV cache beside the one of full attention."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

    if kind == "state space":
        return MambaSpec(block_size=16, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode="align")
    return SlidingWindowSpec(block_size=16, num_kv_heads=1, head_size=64, dtype=torch.float32, sliding_window=24)


def document(number: int, length: int = 40) -> tuple[int, ...]:
    """A document that shares no token with those of other numbers."""
    return tuple(range(100 + 60 * number, 100 + 60 * number + length))


def prompt(*documents: tuple[int, ...], repair: int = 0, question: int = 10) -> SpanPrompt:
    """A head of 8 tokens, documents as spans, a question of some tokens and the 2 that an answer begins with."""
    ids: list[int] = [1, 2, 3, 4, 5, *HEADER]
    spans = []
    for tokens in documents:
        spans.append(Span(len(ids), len(ids) + len(tokens), SpanPrompt(HEADER), repair))
        ids += tokens
    return SpanPrompt((*ids, *range(40, 40 + question), *ANSWER), tuple(spans))


def behind(head: int, *documents: tuple[int, ...], question: int = 10) -> SpanPrompt:
    """Documents behind a head of so many tokens, and a question."""
    asked = prompt(*documents, question=question)
    more = head - asked.spans[0].start
    spans = tuple(replace(span, start=span.start + more, end=span.end + more) for span in asked.spans)
    return SpanPrompt((*range(700, 700 + head - 3), *HEADER, *asked.token_ids[asked.spans[0].start :]), spans)


def conversation(groups: int, documents: int, length: int = 6, question: int = 3) -> SpanPrompt:
    """Groups of documents with a question behind each, anchored at all that stands before their group."""
    ids: list[int] = [1, 2, 3, 4, 5, *HEADER]
    spans: list[Span] = []
    for group in range(groups):
        head = SpanPrompt(tuple(ids), tuple(spans))
        for number in range(documents * group, documents * (group + 1)):
            spans.append(Span(len(ids), len(ids) + length, head))
            ids += (100 + number % 100, 200 + number // 100, *range(300, 298 + length))[:length]
        ids += range(40, 40 + question)
    return SpanPrompt((*ids, *ANSWER), tuple(spans))


def plain(number: int, length: int) -> SpanPrompt:
    """A prompt of one turn that shares no prefix with those of other numbers."""
    return SpanPrompt((900, number, *range(length - 4), *ANSWER))


def judge(inner: SpanPrompt, tokens: list[int], repair: int = 0) -> SpanPrompt:
    """A prompt that takes the output of an inner prompt over, with the header of its turn."""
    start, width = 3, len(ANSWER)
    ids = (2, 1, 2, *ANSWER, *tokens)
    anchor = SpanPrompt(inner.token_ids[:-width], inner.spans)
    return SpanPrompt((*ids, CLOSING, 60, *ANSWER), (Span(start, len(ids), anchor, repair, width),))


def judge_of_many(inner: SpanPrompt, answers: Sequence[Sequence[int]], repair: int = 0) -> SpanPrompt:
    """One that takes over several outputs of an inner prompt that closes a turn before the answer's. They were cut off:
    each but the first brings the closing of the turn before along, so that they stand side by side."""
    ids: list[int] = [2, 1, 2]
    spans: list[Span] = []
    for tokens in answers:
        opening = (CLOSING, *ANSWER) if spans else ANSWER
        start, width = len(ids), len(opening)
        ids += (*opening, *tokens)
        anchor = SpanPrompt(inner.token_ids[:-width], inner.spans)
        spans.append(Span(start, len(ids), anchor, repair, width))
    return SpanPrompt((*ids, CLOSING, 60, *ANSWER), tuple(spans))


def continued(inner: Sequence[SpanPrompt], answers: Sequence[Sequence[int]], has_spans: bool = True) -> SpanPrompt:
    """A prompt that continues the first inner one with its answer, and takes the others over behind it."""
    width = len(ANSWER)
    ids, spans = [*inner[0].token_ids[:-width]], [*inner[0].spans]
    for one, tokens in zip(inner, answers, strict=True):
        first = len(ids)
        ids += [*ANSWER, *tokens]
        spans.append(Span(first, len(ids), SpanPrompt(one.token_ids[:-width], one.spans), 0, width))
        ids.append(CLOSING)
    return SpanPrompt((*ids, 60, *ANSWER), tuple(spans) if has_spans else ())
