"""The default model with the template that it comes with, which inserts a system message."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
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


def test_between_answers_nothing_but_their_last_tokens_is_computed(smollm2: Model) -> None:
    """Answers that were cut off: the template closes them, and the inner prompt has these tokens before its header."""
    inner = smollm2.lower(user("go")).prompt
    answers = tuple(Generated(inner, smollm2.ids(text), text) for text in ("no one", "yes we", "may be"))
    query = seq(sys_("Be fair."), plus(gen(n=3)), user("Q"))
    prompt = smollm2.lower(query, {"$.query.operands[1].operands[0]": answers}).prompt
    assert prompt.token_ids == smollm2.joint(
        ("system", "Be fair."), *(("assistant", answer.text) for answer in answers), ("user", "Q")
    )
    closing, header = smollm2.ids("<|im_end|>\n"), smollm2.ids("<|im_start|>assistant\n")
    assert [span.num_taken for span in prompt.spans] == [len(header), *[len(closing + header)] * 2]
    assert [a.end == b.start for a, b in pairwise(prompt.spans)] == [True, True]
    repaired = smollm2.lower(
        seq(sys_("Be fair."), plus(gen(n=3), rung=repair(2)), user("Q")),
        {"$.query.operands[1].operands[0]": answers},
    ).prompt
    assert [span.num_taken for span in repaired.spans] == [len(header)] * 3


def test_a_judge_without_a_system_message(smollm2: Model) -> None:
    """The inserted one is the constant head: candidates keep their whole header."""
    inner = smollm2.lower(user("go")).prompt
    answers = tuple(Generated(inner, smollm2.ids(text + "<|im_end|>"), text) for text in ("no", "yes"))
    prompt = smollm2.lower(seq(plus(gen(n=2)), user("Q")), {"$.query.operands[0].operands[0]": answers}).prompt
    assert prompt.token_ids == smollm2.joint(("assistant", "no"), ("assistant", "yes"), ("user", "Q"))
    header = len(smollm2.ids("<|im_start|>assistant\n"))
    # The second one brings the line's end in front of its header along: it stood there in the inner prompt as well.
    for span, answer, num_taken in zip(prompt.spans, answers, (header, header + 1), strict=True):
        assert span.num_taken == num_taken
        assert span.anchor.token_ids + prompt.tokens(span) == inner.token_ids + answer.token_ids
