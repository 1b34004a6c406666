"""A tokenizer of whole words for tests without transformers."""

from __future__ import annotations

END = "<|im_end|>"


class WordTokenizer:
    """Learns words as they come; each with the space before it."""

    eos_token_id = 0

    def __init__(self) -> None:
        self.words = [END]
        self.ids = {END: 0}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        pieces = [word for word in text.replace(" ", "\0 ").split("\0") if word]
        for piece in pieces:
            if piece not in self.ids:
                self.ids[piece] = len(self.words)
                self.words.append(piece)
        return [self.ids[piece] for piece in pieces]

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(
            self.words[i] if i < len(self.words) else f" #{i}" for i in ids if not (skip_special_tokens and i == 0)
        )
