"""What the engine is asked for: token ids, and spans over them. Plain integers, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from spanflow.errors import QueryError


def _ids(digest_of: tuple[int, ...]) -> bytes:
    return np.asarray(digest_of, dtype="<i8").tobytes()


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` whose KV may be taken from elsewhere.

    The KV is that of these tokens computed behind `anchor` (itself a prompt, with spans of its own
    where it was assembled), then moved here. The first `repair` tokens are recomputed in context.

    `num_taken` is None for text. For generated text taken over from an inner generation it is the
    number of leading tokens of the span that were the end of the inner prompt (the header of the
    assistant's turn); the rest is what the model sampled.
    """

    start: int
    end: int
    anchor: SpanPrompt = field(repr=False)  # of spans behind spans behind spans there is no end
    repair: int = 0
    num_taken: int | None = None

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def is_generated(self) -> bool:
        """Whether the span is the output of an inner generation."""
        return self.num_taken is not None


@dataclass(frozen=True, slots=True, eq=False)
class SpanPrompt:
    """Token ids and the spans over them, in order and without overlap. Raises QueryError where they do not fit.

    Compares and hashes by `digest`, which covers ids, spans and their anchors.
    """

    token_ids: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    digest: bytes = field(init=False, repr=False)
    _hasher: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        position = 0
        hasher = blake2b(b"prompt", digest_size=16)
        hasher.update(_ids((len(self.spans),)))
        for number, span in enumerate(self.spans):
            if not position <= span.start < span.end <= len(self.token_ids):
                raise QueryError(
                    f"span {number} covers tokens [{span.start}, {span.end}) of a prompt of "
                    f"{len(self.token_ids)}; the spans before it end at {position}"
                )
            if span.repair < 0 or not (span.num_taken is None or 0 <= span.num_taken < len(span)):
                raise QueryError(f"span {number}: repair {span.repair} or num_taken {span.num_taken} is out of range")
            position = span.end
            taken = -1 if span.num_taken is None else span.num_taken
            hasher.update(_ids((span.start, span.end, span.repair, taken)) + span.anchor.digest)
        hasher.update(_ids(self.token_ids))  # last, so that more of them may follow
        object.__setattr__(self, "digest", hasher.digest())
        object.__setattr__(self, "_hasher", hasher)

    def followed_by(self, token_ids: tuple[int, ...]) -> SpanPrompt:
        """The same with more tokens behind it and no more spans. What it has itself is not hashed again."""
        hasher = self._hasher.copy()
        hasher.update(_ids(token_ids))
        longer = object.__new__(SpanPrompt)
        values = (self.token_ids + token_ids, self.spans, hasher.digest(), hasher)
        for name, value in zip(SpanPrompt.__slots__, values, strict=True):
            object.__setattr__(longer, name, value)
        return longer

    def __reduce__(self) -> tuple[Any, ...]:
        return SpanPrompt, (self.token_ids, self.spans)  # a hasher can't be copied between processes

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, SpanPrompt) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __len__(self) -> int:
        return len(self.token_ids)

    def tokens(self, span: Span) -> tuple[int, ...]:
        """The token ids that a span covers."""
        return self.token_ids[span.start : span.end]


#: The anchor of a span that is computed behind nothing.
NO_ANCHOR = SpanPrompt(())


def span_key(prompt: SpanPrompt, span: Span) -> bytes:
    """What a span's KV depends on besides model, adapter and salt: its anchor and its own tokens, as one sequence.

    Where the anchor ends does not matter: an answer may bring more or less of what stood before it along.
    """
    return span.anchor.followed_by(prompt.tokens(span)).digest
