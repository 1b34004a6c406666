"""Text from sampled tokens, piece by piece, with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: What a tokenizer decodes an unfinished character to.
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns token ids into text as they come.

    `decode` maps token ids to text, special tokens left out. Text that may be the beginning of a
    stop string, or of a character of several tokens, is held back. A stop string ends the text
    before it: `stopped` is then True.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(s for s in stop if s)
        self._ids: list[int] = []
        self._known = 0  # ids whose text has been taken
        self._context = 0  # ids from here on are decoded again: a token's text depends on its neighbours
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Take one more token; returns the text that is now certain."""
        self._ids.append(token_id)
        return self._advance(final=False)

    def finish(self) -> str:
        """The text held back until now; nothing after a stop string."""
        return self._advance(final=True)

    def _advance(self, final: bool) -> str:
        if self.stopped:
            return ""
        before = self._decode(self._ids[self._context : self._known])
        text = self._decode(self._ids[self._context :])
        if final or (len(text) > len(before) and not text.endswith(_UNFINISHED)):
            self._held += text[len(before) :]
            self._context, self._known = self._known, len(self._ids)
        found = [place for s in self._stop if (place := self._held.find(s)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = 0 if final else self._num_held_back()
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def _num_held_back(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(s.startswith(self._held[-length:]) for s in self._stop):
                return length
        return 0
