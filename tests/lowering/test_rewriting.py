"""Templates that look at what messages say: the prompt is still theirs, and what is lost is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering.conftest import Model
from lowering.families import FAMILIES
from lowering.tiny import TinyTokenizer
from lowering.trees import MARKED, PLAIN, bot, gen, plus, seq, sys_, user

from spanflow.errors import QueryError
from spanflow.lowering.lower import Generated
from spanflow.lowering.template import ChatTemplate

ADDED = ["<u>", "<a>", "<s>", "<z>", "<think>", "</think>"]
OPEN = "{{ {'user': '<u>', 'assistant': '<a>', 'system': '<s>'}[m.role] }}"
ASKED = "{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"


def model_of(message: str, *, before: str = "", loop: str = "messages") -> Model:
    """A template that writes `message` for each message `m` between its opening and its end."""
    text = f"{before}{{% for m in {loop} %}}{OPEN}{message}{{{{ '<z>' }}}}{{% endfor %}}{ASKED}"
    tokenizer = TinyTokenizer(text, ADDED, eos="<z>")
    return Model(FAMILIES["chatml"], tokenizer, ChatTemplate(tokenizer))


def check(model: Model, lowered: Any, *said: tuple[str, str]) -> None:
    assert model.text(lowered.prompt.token_ids) == model.text(model.joint(*said))


def test_reasoning_is_cut_out_of_earlier_answers(make_model: Any) -> None:
    model = make_model("tiny", "qwen")
    thought = "<think>\nhm\n</think>\n\nYes"
    lowered = model.lower(seq(user("D:", plus("aa", "bb"), "Q"), bot(thought), user("Sure?")))
    said = [("user", "D:aa\n\nbb\n\nQ"), ("assistant", thought), ("user", "Sure?")]
    check(model, lowered, *said)
    assert model.spans(lowered) == ["aa\n\n", "bb\n\n"]
    assert lowered.notes == ()


def test_the_templates_own_tokens_stay_where_text_spells_none(make_model: Any) -> None:
    """The last answer gets the tokens of an empty thought."""
    model = make_model("tiny", "qwen")
    lowered = model.lower(seq(user("a"), bot("b")))
    assert lowered.prompt.token_ids == model.joint(("user", "a"), ("assistant", "b"))
    assert model.tokenizer.get_added_vocab()["</think>"] in lowered.prompt.token_ids


def test_candidates_that_are_the_last_words(make_model: Any) -> None:
    """The wrapper around the last answers stays outside of the spans."""
    model = make_model("tiny", "qwen")
    inner = model.lower(user("go")).prompt
    answers = (Generated(inner, model.ids("one<|im_end|>"), "one"), Generated(inner, model.ids("two<|im_end|>"), "two"))
    lowered = model.lower(seq(user("a"), plus(gen(n=2))), {"$.query.operands[1].operands[0]": answers})
    check(model, lowered, ("user", "a"), ("assistant", "one"), ("assistant", "two"))
    assert [lowered.prompt.tokens(s)[s.num_taken :] for s in lowered.prompt.spans] == [a.token_ids for a in answers]
    for span, given_ in zip(lowered.prompt.spans, answers, strict=True):
        assert span.anchor.token_ids + lowered.prompt.tokens(span) == inner.token_ids + given_.token_ids


def test_spans_of_a_message_that_is_rewritten_are_dropped() -> None:
    model = model_of("{{ m.content.replace('colour', 'color') }}")
    lowered = model.lower(seq(user("D:", plus("colour", "bb"), "Q"), bot("x"), user("E:", plus("cc"))))
    check(model, lowered, ("user", "D:colour\n\nbb\n\nQ"), ("assistant", "x"), ("user", "E:cc\n\n"))
    assert model.spans(lowered) == ["cc\n\n"]
    assert lowered.notes == ("$.query.operands[0]: spans dropped: the chat template rewrites what this message says",)


def test_whole_messages_that_are_rewritten_stay_spans() -> None:
    model = model_of("{{ m.content.replace('colour', 'color') }}")
    lowered = model.lower(seq(sys_("s"), plus(user("colour"), user("bb")), user("Q")))
    assert model.spans(lowered) == ["<u>color<z>", "<u>bb<z>"]
    check(model, lowered, ("system", "s"), ("user", "colour"), ("user", "bb"), ("user", "Q"))


def test_a_rewritten_message_with_an_answer_in_it() -> None:
    model = model_of("{{ m.content.replace('colour', 'color') }}")
    answer = Generated(model.lower(user("go")).prompt, (900, 901), "colour")
    model.tokenizer._texts.update({900: "col", 901: "our"})
    lowered = model.lower(user("a colour: ", plus(gen()), "?"), {"$.query.parts[1].operands[0]": (answer,)})
    assert model.text(lowered.prompt.token_ids) == "<u>a color: colour\n\n?<z><a>"
    assert lowered.prompt.spans == ()
    assert any("spans dropped" in note for note in lowered.notes)


def test_control_tokens_in_a_rewritten_message_are_text() -> None:
    model = model_of("{{ m.content.replace('colour', 'color') }}")
    ids = model.lower(user("<z><a>colour <u>")).prompt.token_ids
    assert model.text(ids) == "<u><z><a>color <u><z><a>"
    assert [token for token in ids if token < len(ADDED)] == [0, 3, 1]


REWRITES = "it rewrites what messages say, depending on what they say"


@pytest.mark.parametrize(
    ("message", "text", "why"),
    [
        ("{{ m.content }}, {{ m.content }}", "D:", "it repeats what a message says"),
        ("{{ m.content | upper }}", "D:", REWRITES),
        ("{{ m.content ~ (messages | map(attribute='content') | join).count('Z') }}", "Z:", REWRITES),
        ("{{ m.content if messages[0].content[0] != 'D' else 'n' }}", "D:", REWRITES),
        ("{{ m.content.strip() ~ ('.' if m.content[0] == ' ') }}", " D:", "it changes the white space around"),
        ("{{ m.content if messages[0].content[0] != ' ' }}", " D:", "the order of messages depends on the white space"),
        ("{{ m.content ~ (raise_exception('!') if m.content | length == 33) }}", "D:", "it refuses other words"),
    ],
)
def test_what_cannot_be_taken_apart_is_the_templates_own(message: str, text: str, why: str) -> None:
    model = model_of("{{ m.content }}")
    model.tokenizer.chat_template = model.tokenizer.chat_template.replace("{{ m.content }}", message)
    lowered = model.lower(seq(user(text, plus("aa", "bb"), "Q"), bot("x"), user("y")))
    said = ("user", text + "aa\n\nbb\n\nQ"), ("assistant", "x"), ("user", "y")
    assert lowered.prompt.token_ids == model.joint(*said)
    assert lowered.prompt.spans == ()
    (note,) = lowered.notes
    assert note.startswith("$.query: no spans: the chat template cannot be taken apart for these messages: ")
    assert why in note
    assert model.lower(user(text)).notes == ()  # nothing is lost where nobody asked for spans


def test_control_tokens_in_what_cannot_be_taken_apart_are_refused() -> None:
    model = model_of("{{ m.content }} {{ m.content }}")
    with pytest.raises(
        QueryError, match=r"^\$\.query\.operands\[1\]\.parts\[0\]: the text contains '<z>', a control token"
    ):
        model.lower(seq(user("a"), bot("b<z>")))


def test_answers_in_what_cannot_be_taken_apart() -> None:
    model = model_of("{{ m.content }}, {{ m.content }}")
    answer = Generated(model.lower(user("go")).prompt, (900, 3), "no")
    model.tokenizer._texts[900] = "no"
    lowered = model.lower(seq(user("a"), plus(gen())), {"$.query.operands[1].operands[0]": (answer,)})
    assert model.text(lowered.prompt.token_ids) == "<u>a, a<z><a>no, no<z><a>"
    assert lowered.prompt.token_ids.count(900) == 2
    assert lowered.prompt.spans == ()


def test_a_system_message_that_moves_to_the_last_user_message() -> None:
    before = "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    loop = "(messages if messages[0].role != 'system' else messages[1:])"
    model = model_of("{{ s ~ '|' if loop.last and s }}{{ m.content }}", before=before, loop=loop)
    lowered = model.lower(seq(sys_("s", plus("x", "y")), user("D:", plus("aa"), "Q"), bot("b"), user(plus("c"), "Q")))
    check(
        model,
        lowered,
        ("system", "sx\n\ny\n\n"),
        ("user", "D:aa\n\nQ"),
        ("assistant", "b"),
        ("user", "c\n\nQ"),
    )
    assert model.spans(lowered) == ["aa\n\n", "x\n\n", "y\n\n", "c\n\n"]
    moved = model.lower(seq(plus(seq(sys_("s"), user("u")), user("v")), user("Q")))
    assert moved.prompt.spans == ()
    assert moved.notes == (
        "$.query.operands[0].operands[0]: spans dropped: the chat template moves or drops these messages",
    )


def test_a_message_that_is_dropped() -> None:
    model = model_of("{{ m.content }}", loop="(messages if messages[0].role != 'system' else messages[1:])")
    lowered = model.lower(seq(sys_("s", plus("x")), user(plus("aa"), "Q")))
    check(model, lowered, ("system", "s"), ("user", "aa\n\nQ"))
    assert model.spans(lowered) == ["aa\n\n"]


def test_a_folded_system_message_leaves_spans_of_contents(make_model: Any) -> None:
    """The first operand has no header of its own there: so none of them takes its header along."""
    text = FAMILIES["gemma"].text.replace("turn.role != ns.expected", "false")
    tokenizer = TinyTokenizer(text, ["<bos>", "<start_of_turn>", "<end_of_turn>"], "<bos>", "<end_of_turn>")
    model = Model(FAMILIES["gemma"], tokenizer, ChatTemplate(tokenizer))
    lowered = model.lower(seq(sys_("s"), plus(user("aa"), seq(user("b"), bot("c")), user("")), user("Q")))
    said = [("user", "aa"), ("user", "b"), ("assistant", "c"), ("user", ""), ("user", "Q")]
    check(model, lowered, ("system", "s"), *said)
    assert model.spans(lowered) == ["aa", "b<end_of_turn>\n<start_of_turn>model\nc"]
    assert lowered.notes == (
        "$.query.operands[1].operands[0]: spans trimmed to what the messages say: the chat template opens or closes "
        "them differently by place",
    )
    other = model.lower(seq(sys_("s"), plus(seq(user("b"), bot("c")), user("aa")), user("Q")))
    assert model.spans(other) == model.spans(lowered)[::-1]


@pytest.mark.parametrize("trim", ["strip()", "lstrip()", "rstrip()", "strip('\n')", "lstrip('\n')"])
def test_white_space_is_trimmed_as_the_template_does(trim: str) -> None:
    model = model_of("{{ m.content." + trim.replace("\n", "\\n") + " }}")
    for text in ["\n a \n", "a", "", "\n\n", " \n", "\t\na\n\t", "\n\na b\n\n"]:
        lowered = model.lower(seq(user(text), bot(text, text), user(text, "x")))
        assert lowered.prompt.token_ids == model.joint(("user", text), ("assistant", text * 2), ("user", text + "x"))


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(PLAIN | MARKED, min_size=3, max_size=3))
@pytest.mark.parametrize(
    "message",
    [
        "{{ m.content }}",
        "{{ m.content | trim }}",
        "{{ m.content.replace('Z', '') }}",
        "{{ m.content.split('</think>')[-1] }}",
    ],
)
def test_any_text_in_any_of_them(message: str, texts: list[str]) -> None:
    """The prompt reads as the template writes it, and no text makes a control token."""
    model = model_of(message)
    lowered = model.lower(seq(user(texts[0]), bot(texts[1]), user(texts[2])))
    check(model, lowered, ("user", texts[0]), ("assistant", texts[1]), ("user", texts[2]))
    assert [token for token in lowered.prompt.token_ids if token < len(ADDED)] == [0, 3, 1, 3, 0, 3, 1]
