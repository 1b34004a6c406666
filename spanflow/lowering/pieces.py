"""Text to token ids, piece by piece, with user text kept from turning into control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from spanflow.errors import QueryError

#: Put before a piece that does not begin the prompt, where the tokenizer would add a space to it.
_GUARDS = ("\n", ".", "a")
_SAMPLES = ("a", "Hello", "7", "(", "é")
#: Texts of up to so many characters are remembered with their ids, and so many of them.
_MAX_REMEMBERED, _NUM_REMEMBERED = 8192, 2048
_is_data = attrgetter("is_data")


class Run(NamedTuple):
    """A stretch of text inside a piece: `is_data` where it comes from the query and not from the template."""

    text: str
    is_data: bool


class Encoded(NamedTuple):
    """A piece's token ids, and the texts at its two ends that were tokenised in one go."""

    token_ids: tuple[int, ...]
    first: str
    last: str


def added_tokens(tokenizer: Any) -> dict[str, int]:
    """The strings that a tokenizer turns into one id wherever they stand, special or not."""
    return {text: int(token) for text, token in tokenizer.get_added_vocab().items() if text}


def is_blank(text: str) -> bool:
    """Whether a token stands for white space only; some vocabularies add runs of newlines and spaces."""
    return not text.replace("▁", " ").strip()


def num_shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How many items two sequences have in common at their beginning."""
    shorter = min(len(one), len(other))
    return next((i for i in range(shorter) if one[i] != other[i]), shorter)


class PieceTokenizer:
    """Tokenises the pieces of one prompt.

    `tokenizer` is a Hugging Face tokenizer or anything with its `encode` and `get_added_vocab`.
    `markers` are its added tokens other than white space: user text never yields one of their ids.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # The same headers and documents come again and again.
        self._remembered = lru_cache(_NUM_REMEMBERED)(self._read)
        self.markers: Mapping[str, int] = {t: i for t, i in added_tokens(tokenizer).items() if not is_blank(t)}
        self._marker_ids = frozenset(self.markers.values())
        self._by_opening: dict[str, list[str]] = {}
        for marker in sorted(self.markers, key=len, reverse=True):
            self._by_opening.setdefault(marker[:2], []).append(marker)
        openings = "|".join(map(re.escape, self._by_opening))
        self._openings = re.compile(f"(?={openings})") if openings else None
        self._is_guarded = any(self._guarded(text) != self._plain(text) for text in _SAMPLES)

    def encode(self, runs: Sequence[Run], *, is_first: bool, where: str) -> Encoded:
        """The ids of one piece; `is_first` where it begins the prompt, `where` names it in errors.

        Text of the template is read with its control tokens; text of the query is cut inside every
        control token that it spells, so that none is recognised. Raises QueryError where that fails.
        """
        text = "".join(run.text for run in runs)
        ends = [*self._cuts(text, runs, where), len(text)]
        parts = [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        ids = [self._plain(p) if is_first and i == 0 else self.encode_inner(p) for i, p in enumerate(parts)]
        flat = tuple(token for part in ids for token in part)
        if any(run.is_data for run in runs):
            self._check_markers(flat, runs, where)
        return Encoded(flat, parts[0], parts[-1])

    def encode_first(self, text: str) -> tuple[int, ...]:
        """The ids of text that begins a prompt, without tokens that the tokenizer would add around it."""
        return self._plain(text)

    def encode_inner(self, text: str) -> tuple[int, ...]:
        """The ids of text that stands somewhere inside a prompt: no space is added before it."""
        return self._guarded(text) if self._is_guarded else self._plain(text)

    def find_markers(self, text: str) -> Iterator[tuple[int, str]]:
        """Each place where an added token is spelled, with the longest that begins there; they may overlap."""
        if self._openings is None:
            return
        for found in self._openings.finditer(text):
            start = found.start()
            known = self._by_opening.get(text[start : start + 2], []) + self._by_opening.get(text[start], [])
            found_here = next((marker for marker in known if text.startswith(marker, start)), None)
            if found_here is not None:
                yield start, found_here

    def num_differing(self, left: str, right: str) -> int:
        """How many tokens a cut between two texts changes, against tokenising them in one go; looks 256 characters
        to each side."""
        left, right = left[-256:], right[:256]
        apart = self.encode_inner(left) + self.encode_inner(right)
        joint = self.encode_inner(left + right)
        if apart == joint:
            return 0
        same = num_shared(apart, joint)
        behind = num_shared(apart[same:][::-1], joint[same:][::-1])
        return max(len(apart), len(joint)) - same - behind

    def _cuts(self, text: str, runs: Sequence[Run], where: str) -> list[int]:
        """Where to cut the text so that no added token lies in it other than in the template's own text."""
        cuts: set[int] = set()
        bounds: list[tuple[int, int]] = []
        position = 0
        for run in runs:
            if run.is_data and run.text:
                bounds.append((position, position + len(run.text)))
            position += len(run.text)
        if not bounds:
            return []
        number = 0
        for start, marker in self.find_markers(text):
            end = start + len(marker)
            while number < len(bounds) and bounds[number][1] <= start:
                number += 1
            if number == len(bounds):
                break
            data_start = bounds[number][0]
            if end <= data_start:
                continue
            if len(marker) == 1:
                raise QueryError(
                    f"{where}: the text contains {marker!r}, a control token of this model that cannot be "
                    "spelled as ordinary text; remove it"
                )
            cuts.add(max(data_start, start + 1))
        return sorted(cuts)

    def _check_markers(self, token_ids: tuple[int, ...], runs: Sequence[Run], where: str) -> None:
        found = [token for token in token_ids if token in self._marker_ids]
        if not found:
            return
        of_template = ["".join(run.text for run in group) for is_data, group in groupby(runs, _is_data) if not is_data]
        ids = [token for text in of_template for token in self.encode_inner(text)]
        if found != [token for token in ids if token in self._marker_ids]:
            names = ", ".join(sorted({text for text, token in self.markers.items() if token in found}))
            raise QueryError(
                f"{where}: the text spells a control token of this model ({names}) in a way that its tokenizer "
                "does not let through as ordinary text; remove it"
            )

    def _plain(self, text: str) -> tuple[int, ...]:
        return self._remembered(text) if len(text) <= _MAX_REMEMBERED else self._read(text)

    def _read(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _guarded(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        for guard in _GUARDS:
            before, both = self._plain(guard), self._plain(guard + text)
            if len(both) > len(before) and both[: len(before)] == before:
                return both[len(before) :]
        return self._plain(text)
