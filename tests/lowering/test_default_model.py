"""The default model with the template that it comes with, which inserts a system message."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lowering.conftest import Model
from lowering.families import FAMILIES
from lowering.trees import gen, plus, seq, sys_, user

from spanflow.ir.fidelity import repair
from spanflow.lowering.lower import Generated
from spanflow.lowering.prompt import SpanPrompt
from spanflow.lowering.template import ChatTemplate

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def smollm2(tokenizer_dir: Path) -> Iterator[Model]:
    transformers = pytest.importorskip("transformers", reason="the torch tier needs transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tokenizer_dir))
    yield Model(FAMILIES["chatml"], tokenizer, ChatTemplate(tokenizer))


def test_its_bos_is_no_bos_of_a_prompt(smollm2: Model) -> None:
    assert smollm2.tokenizer.bos_token == "<|im_start|>"
    assert smollm2.template.bos == ""
    assert [smollm2.text(header) for header in smollm2.template.headers()] == [
        "<|im_start|>system\n",
        "<|im_start|>user\n",
        "<|im_start|>assistant\n",
    ]


def test_the_system_message_that_it_inserts(smollm2: Model) -> None:
    prompt = smollm2.lower(user("hi")).prompt
    assert prompt.token_ids == smollm2.joint(("user", "hi"))
    assert "SmolLM" in smollm2.text(prompt.token_ids)
    alone = smollm2.lower(seq(sys_(""), user("hi"))).prompt
    assert "SmolLM" not in smollm2.text(alone.token_ids)


def test_documents_with_a_question(smollm2: Model) -> None:
    lowered = smollm2.lower(user("Documents:\n", plus("First one.", "Second one."), "Which?"), rung=repair(32))
    assert smollm2.spans(lowered) == ["First one.\n\n", "Second one.\n\n"]
    assert [(span.repair, span.anchor) for span in lowered.prompt.spans] == [
        (len(span), SpanPrompt(smollm2.ids("<|im_start|>user\n"))) for span in lowered.prompt.spans
    ]
    joint = smollm2.joint(("user", "Documents:\nFirst one.\n\nSecond one.\n\nWhich?"))
    assert smollm2.text(lowered.prompt.token_ids) == smollm2.text(joint)


def test_a_judge_without_a_system_message(smollm2: Model) -> None:
    """The inserted one is the constant head: candidates keep their whole header."""
    inner = smollm2.lower(user("go")).prompt
    answers = tuple(Generated(inner, smollm2.ids(text + "<|im_end|>"), text) for text in ("no", "yes"))
    prompt = smollm2.lower(seq(plus(gen(n=2)), user("Q")), {"$.query.operands[0].operands[0]": answers}).prompt
    assert prompt.token_ids == smollm2.joint(("assistant", "no"), ("assistant", "yes"), ("user", "Q"))
    for span, answer in zip(prompt.spans, answers, strict=True):
        assert span.num_taken == len(smollm2.ids("<|im_start|>assistant\n"))
        assert span.anchor.token_ids + prompt.tokens(span) == inner.token_ids + answer.token_ids
