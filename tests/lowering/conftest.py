"""Tokenizers and templates for the tests of lowering: tiny ones, and the default model's in the torch tier."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lowering.families import FAMILIES, Family, on_model, tiny

from spanflow.ir.fidelity import MOVED, Anchor, Rung
from spanflow.ir.nodes import Node
from spanflow.lowering.lower import Generated, Lowered, lower
from spanflow.lowering.template import ChatTemplate


class Model(NamedTuple):
    """A family's tokenizer with its template, taken apart."""

    family: Family
    tokenizer: Any
    template: ChatTemplate

    def joint(self, *messages: tuple[str, str]) -> tuple[int, ...]:
        """The ids of the tokenizer's own chat template."""
        conversation = [{"role": role, "content": content} for role, content in messages]
        text = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **self.family.options
        )
        ids = self.tokenizer.apply_chat_template(
            conversation, tokenize=True, return_dict=False, add_generation_prompt=True, **self.family.options
        )
        assert list(ids) == self.tokenizer.encode(text, add_special_tokens=False)
        return tuple(ids)

    def ids(self, text: str) -> tuple[int, ...]:
        """The ids of a text on its own."""
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: tuple[int, ...]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def lower(
        self,
        query: Node,
        generated: Mapping[str, tuple[Generated, ...]] | None = None,
        *,
        rung: Rung | None = MOVED,
        anchor: Anchor = "header",
    ) -> Lowered:
        """Lower, with what the tests take for the session's defaults."""
        return lower(query, self.template, generated=generated or {}, rung=rung, anchor=anchor)

    def spans(self, lowered: Lowered) -> list[str]:
        """The texts of a prompt's spans."""
        return [self.text(lowered.prompt.tokens(span)) for span in lowered.prompt.spans]


@pytest.fixture(scope="session")
def tokenizer_dir(request: pytest.FixtureRequest) -> Path:
    """Where the default model's tokenizer lies."""
    if given := os.environ.get("SPANFLOW_TEST_MODEL"):
        return Path(given)
    return Path(request.getfixturevalue("model_dir"))


@pytest.fixture(scope="session")
def make_model(request: pytest.FixtureRequest) -> Callable[[str, str], Model]:
    """A family on a base: 'tiny', or 'model' for the default model's tokenizer; made once."""
    made: dict[tuple[str, str], Model] = {}

    def make(base: str, name: str) -> Model:
        if (base, name) not in made:
            family = FAMILIES[name]
            if base == "tiny":
                tokenizer: Any = tiny(family)
            else:
                pytest.importorskip("transformers", reason="the torch tier needs transformers")
                tokenizer = on_model(family, request.getfixturevalue("tokenizer_dir"))
            made[base, name] = Model(family, tokenizer, ChatTemplate(tokenizer, options=family.options))
        return made[base, name]

    return make


@pytest.fixture(scope="session", params=["tiny", pytest.param("model", marks=pytest.mark.torch)])
def base(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _cases(*, free: bool = False) -> list[Any]:
    """(base, family) pairs; the variants of a family run on the tiny tokenizer only."""
    names = [name for name, family in FAMILIES.items() if not (free and family.takes_turns)]
    main = [name for name in names if name == FAMILIES[name].template]
    on_tiny = [pytest.param(("tiny", name), id=f"{name}-tiny") for name in names]
    return on_tiny + [pytest.param(("model", name), id=f"{name}-model", marks=pytest.mark.torch) for name in main]


@pytest.fixture(scope="session", params=_cases())
def model(request: pytest.FixtureRequest, make_model: Callable[[str, str], Model]) -> Model:
    """Each family on each base."""
    return make_model(*request.param)


@pytest.fixture(scope="session")
def chatml(base: str, make_model: Callable[[str, str], Model]) -> Model:
    return make_model(base, "chatml")


@pytest.fixture(scope="session")
def llama3(base: str, make_model: Callable[[str, str], Model]) -> Model:
    return make_model(base, "llama3")


@pytest.fixture(scope="session", params=_cases(free=True))
def free_model(request: pytest.FixtureRequest, make_model: Callable[[str, str], Model]) -> Model:
    """Families that let roles follow each other as they like."""
    return make_model(*request.param)
