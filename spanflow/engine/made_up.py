"""Answers without a model: scripted, or words that follow from the prompt."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from spanflow.engine.protocol import EngineRequest

#: Scripts an answer: text, token ids, or None for a made-up one.
Script = Callable[[EngineRequest], str | Sequence[int] | None]

_WORDS = """
time way year work part case point group number area water story fact month lot right study book eye job word business
issue side kind head house service friend power hour game line end member law car city name team minute idea body back
"""


class MadeUp:
    """Answers in the vocabulary of a tokenizer (`encode` and `eos_token_id` are used), the same again for the same."""

    def __init__(self, tokenizer: Any, script: Script | None = None) -> None:
        self._tokenizer = tokenizer
        self._script = script

    def answer(self, request: EngineRequest, max_tokens: int) -> tuple[list[int], bool]:
        """At most `max_tokens` ids, at least one, and whether the last one is the model's end token."""
        scripted = self._script(request) if self._script is not None else None
        if isinstance(scripted, str):
            ids = self._encode(scripted)
        elif scripted is not None:
            ids = [int(i) for i in scripted]
        else:
            ids = self._draw(request, max_tokens)
        if len(ids) < max_tokens:
            return [*ids, int(self._tokenizer.eos_token_id)], True
        return ids[:max_tokens], False

    def _draw(self, request: EngineRequest, max_tokens: int) -> list[int]:
        """Words drawn by the prompt; at a temperature by the seed too, or by the request where there is none."""
        sampling = request.sampling
        drawn_by = request.prompt.digest.hex()
        if sampling.temperature > 0:
            drawn_by += request.request_id if sampling.seed is None else str(sampling.seed)
        dice = random.Random(drawn_by)
        length = dice.randint(max(1, max_tokens // 2), max_tokens)
        ids: list[int] = []
        while len(ids) < length:
            ids += self._words[dice.randrange(len(self._words))]
        return ids[:length]

    @cached_property
    def _words(self) -> list[list[int]]:
        return [ids for word in _WORDS.split() if (ids := self._encode(f" {word}"))]

    def _encode(self, text: str) -> list[int]:
        return [int(i) for i in self._tokenizer.encode(text, add_special_tokens=False)]
