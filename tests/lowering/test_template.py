"""A chat template taken apart."""

from __future__ import annotations

import pytest
from lowering.conftest import Model
from lowering.families import FAMILIES, tiny
from lowering.tiny import TinyTokenizer

from spanflow.errors import ModelError, QueryError
from spanflow.lowering.template import ChatTemplate

# family: (opening, closing) of user and assistant, header of an answer, end of turn, BOS
EXPECTED = {
    "chatml": (
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>\n"),
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "",
    ),
    "llama3": (
        ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>"),
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "mistral": (("[INST] ", " [/INST]"), (" ", "</s>"), "", "</s>", "<s>"),
    "mistral_words": (("[INST] ", " [/INST]"), (" ", "</s>"), "", "</s>", "<s>"),
    "gemma": (
        ("<start_of_turn>user\n", "<end_of_turn>\n"),
        ("<start_of_turn>model\n", "<end_of_turn>\n"),
        "<start_of_turn>model\n",
        "<end_of_turn>",
        "<bos>",
    ),
    "qwen": (
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>\n"),
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "",
    ),
    "qwen_quick": (
        ("<|im_start|>user\n", "<|im_end|>\n"),
        ("<|im_start|>assistant\n", "<|im_end|>\n"),
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_end|>",
        "",
    ),
}


def test_parts_of_each_family(model: Model) -> None:
    template = model.template
    user, assistant, header, end, bos = EXPECTED[model.family.name]
    assert (template.opening["user"], template.closing["user"]) == user
    assert (template.opening["assistant"], template.closing["assistant"]) == assistant
    assert template.generation_header == header
    assert template.end_of_turn == end
    assert template.end_of_turn_id == model.ids(end)[0]
    assert template.bos == bos


def test_headers_begin_each_prompt_of_their_role(model: Model) -> None:
    template = model.template
    begin = model.text(model.joint(("system", "be brief"), ("user", "hi")))
    assert begin.startswith(model.text(template.header("system")) + "be brief")
    assert model.text(template.header("user")) == template.bos + template.opening["user"]
    assert set(template.headers()) == {template.header(role) for role in ("system", "user", "assistant")}
    assert len(template.headers()) == len(set(template.headers()))


def test_system_header_of_a_folding_template_opens_the_user_message() -> None:
    template = ChatTemplate(tiny(FAMILIES["gemma"]))
    assert template.header("system") == template.header("user")


def test_ids_that_end_an_answer() -> None:
    tokenizer = tiny(FAMILIES["gemma"])
    added = tokenizer.get_added_vocab()
    assert ChatTemplate(tokenizer).end_ids == {added["<eos>"], added["<end_of_turn>"]}
    assert ChatTemplate(tokenizer, end_ids=[77]).end_ids == {added["<eos>"], added["<end_of_turn>"], 77}


def test_a_template_of_words_has_no_end_of_turn() -> None:
    words = "{% for m in messages %}{{ '### ' ~ m.role ~ ':\n' ~ m.content ~ '\n' }}{% endfor %}"
    template = ChatTemplate(TinyTokenizer(words + "{% if add_generation_prompt %}### assistant:\n{% endif %}", ["<x>"]))
    assert (template.end_of_turn, template.end_of_turn_id, template.bos) == ("", None, "")
    assert template.opening["user"] == "### user:\n"
    assert template.closing["assistant"] == "\n"
    assert template.generation_header == "### assistant:\n"


def test_the_last_message_may_end_differently() -> None:
    text = (
        "{% for m in messages %}{{ '<a>' ~ m.role ~ '>' ~ m.content ~ '<z>' }}{% if not loop.last %}{{ '\n' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\n<a>assistant>' }}{% endif %}"
    )
    template = ChatTemplate(TinyTokenizer(text, ["<a>", "<z>"], eos="<z>"))
    assert template.closing["user"] == template.closing["assistant"] == "<z>"
    assert template.opening["user"] == "<a>user>"
    assert template.end_of_turn == "<z>"


def test_a_template_for_one_turn_only() -> None:
    text = (
        "{% if messages | length > 1 %}{{ raise_exception('one message, please') }}{% endif %}"
        "{{ '<s>Q: ' ~ messages[0].content ~ '\nA:' }}"
    )
    template = ChatTemplate(TinyTokenizer(text, ["<s>"], bos="<s>"))
    assert template.headers() == (template.pieces.encode_first("<s>Q: "),)
    with pytest.raises(QueryError, match=r"\$\.query: .*refuses these messages \(user, user\): one message, please\."):
        template.render([("user", "a"), ("user", "b")], where="$.query")


def test_no_template_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"no chat template, so there is no telling.*set tokenizer\.chat_template"):
        ChatTemplate(TinyTokenizer(None, []))


def test_a_template_that_renders_nothing_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"cannot render one user message: .*not today"):
        ChatTemplate(TinyTokenizer("{{ raise_exception('not today') }}", []))


@pytest.mark.parametrize("text", ["constant", "{{ messages[0].content | upper }}", "{{ messages[0].content * 2 }}"])
def test_a_template_without_parts(text: str) -> None:
    template = ChatTemplate(TinyTokenizer(text, ["<x>"]))
    assert template.headers() == ()
    assert set(template.opening.values()) == set(template.closing.values()) == {""}


def test_a_refusal_gives_the_templates_words_and_advice() -> None:
    template = ChatTemplate(tiny(FAMILIES["gemma"]))
    with pytest.raises(QueryError) as caught:
        template.render([("user", "a"), ("user", "b")], where="$.query")
    assert str(caught.value) == (
        "$.query: the model's chat template refuses these messages (user, user): Roles must alternate "
        "user/assistant/user/assistant. Many templates want roles that alternate, user first: put the documents "
        "inside one message, as in user(commute(...), question)"
    )
