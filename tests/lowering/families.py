"""Chat templates in the style of the common families, on any tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowering.tiny import TinyTokenizer

_TEMPLATES = Path(__file__).parent / "templates"
#: In every vocabulary, as in the default model's.
_COMMON = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>")


@dataclass(frozen=True)
class Family:
    """A template and the control tokens that it needs; `takes_turns`: user and assistant must alternate."""

    name: str
    template: str
    special: Sequence[str] = ()
    added: Sequence[str] = ()
    bos: str = ""
    eos: str = "<|im_end|>"
    takes_turns: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        return (_TEMPLATES / f"{self.template}.jinja").read_text()


FAMILIES = {
    family.name: family
    for family in (
        Family("chatml", "chatml", bos="<|im_start|>"),
        Family(
            "llama3",
            "llama3",
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
            added=("\n\n",),  # one token in that family's vocabulary, whatever follows
            bos="<|begin_of_text|>",
            eos="<|eot_id|>",
        ),
        Family("mistral", "mistral", ("<s>", "</s>", "[INST]", "[/INST]"), bos="<s>", eos="</s>", takes_turns=True),
        Family("mistral_words", "mistral", ("<s>", "</s>"), bos="<s>", eos="</s>", takes_turns=True),
        Family(
            "gemma",
            "gemma",
            ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
            added=("\n\n", "<table>"),
            bos="<bos>",
            eos="<eos>",
            takes_turns=True,
        ),
        Family("qwen", "qwen", added=("<think>", "</think>")),
        Family("qwen_quick", "qwen", added=("<think>", "</think>"), options={"enable_thinking": False}),
    )
}


def tiny(family: Family) -> TinyTokenizer:
    """The family's template on the tiny tokenizer."""
    return TinyTokenizer(family.text, (*_COMMON, *family.special, *family.added), family.bos, family.eos)


def on_model(family: Family, tokenizer_dir: Path) -> Any:
    """The family's template on the default model's tokenizer."""
    from transformers import AddedToken, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(tokenizer_dir))
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in family.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.added])
    tokenizer.bos_token = family.bos or None
    tokenizer.eos_token = family.eos
    tokenizer.chat_template = family.text
    return tokenizer
