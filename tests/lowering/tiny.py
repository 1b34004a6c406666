"""A tokenizer of a screenful, with the surface of a Hugging Face tokenizer that lowering uses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

_WORDS = re.compile(r"\n+| ?\w+| ?[^\w\s]+|\s")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


@cache
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


class TinyTokenizer:
    """Words, with the space before them, and runs of newlines are tokens; ids are given as words come.

    Texts in `added` become one id wherever they stand, as in a Hugging Face tokenizer.
    """

    def __init__(self, template: str | None, added: Sequence[str], bos: str = "", eos: str = "") -> None:
        self.chat_template = template
        self.bos_token = bos or None
        self.eos_token = eos or None
        self._added = {text: number for number, text in enumerate(added)}
        self._ids: dict[str, int] = {}
        self._texts: dict[int, str] = {number: text for text, number in self._added.items()}
        self._split = re.compile("(" + "|".join(map(re.escape, sorted(added, key=len, reverse=True))) + ")")

    @property
    def eos_token_id(self) -> int | None:
        return None if self.eos_token is None else self._added[self.eos_token]

    def get_added_vocab(self) -> dict[str, int]:
        return dict(self._added)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens, "the template brings its own"
        ids: list[int] = []
        for part in self._split.split(text) if self._added else [text]:
            if part in self._added:
                ids.append(self._added[part])
            else:
                ids += [self._word(found[0]) for found in _WORDS.finditer(part)]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self._texts[token] for token in ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        assert self.chat_template is not None
        text = _compiled(self.chat_template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            bos_token=self.bos_token,
            eos_token=self.eos_token,
            **options,
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _word(self, word: str) -> int:
        if word not in self._ids:
            self._ids[word] = 1000 + len(self._ids)
            self._texts[self._ids[word]] = word
        return self._ids[word]
