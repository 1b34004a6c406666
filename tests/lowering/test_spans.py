"""Where spans lie, what they are computed behind, and what of them is computed again."""

from __future__ import annotations

import pytest
from lowering.conftest import Model
from lowering.families import FAMILIES
from lowering.tiny import TinyTokenizer
from lowering.trees import bot, plus, seq, sys_, user

from spanflow.errors import QueryError
from spanflow.ir.fidelity import EXACT, MOVED, repair
from spanflow.ir.nodes import Retrieve
from spanflow.lowering.lower import SpanSource
from spanflow.lowering.prompt import NO_ANCHOR, SpanPrompt
from spanflow.lowering.template import ChatTemplate


def test_each_operand_is_a_span_with_its_separator(model: Model) -> None:
    lowered = model.lower(seq(sys_("Be brief."), user("Docs:\n", plus("aa", "", "b b"), "Which?")))
    assert model.spans(lowered) == ["aa\n\n", "b b\n\n"]
    text = model.text(model.joint(("system", "Be brief."), ("user", "Docs:\naa\n\nb b\n\nWhich?")))
    assert model.text(lowered.prompt.token_ids) == text
    first, second = lowered.prompt.spans
    assert first.end == second.start
    assert [span.anchor for span in lowered.prompt.spans] == [SpanPrompt(model.template.header("user"))] * 2
    path = "$.query.operands[1].parts[1].operands"
    assert lowered.sources == (
        SpanSource(f"{path}[0]", "text", MOVED, "header", len(first)),
        SpanSource(f"{path}[2]", "text", MOVED, "header", len(second)),
    )


def test_spans_are_tokenised_on_their_own(model: Model) -> None:
    lowered = model.lower(user("Docs:\n", plus("aa\n", "\nb", "c"), "\nWhich?"))
    tokens = [lowered.prompt.tokens(span) for span in lowered.prompt.spans]
    assert tokens == [model.ids("aa\n\n\n"), model.ids("\nb\n\n"), model.ids("c\n\n")]
    assert lowered.num_tokens_differing > 0


def test_cuts_that_change_nothing_count_nothing(model: Model) -> None:
    lowered = model.lower(user("Docs:", plus(" aa", " b", separator=""), " Which?"))
    assert lowered.num_tokens_differing == 0
    assert lowered.prompt.token_ids == model.joint(("user", "Docs: aa b Which?"))


def test_the_head_is_that_of_an_ordinary_prompt(model: Model) -> None:
    query = seq(sys_("Be brief."), user("Read the documents:\n", plus("aa", "bb"), "Which?"))
    lowered = model.lower(query)
    joint = model.joint(("system", "Be brief."), ("user", "Read the documents:\naa\n\nbb\n\nWhich?"))
    first = lowered.prompt.spans[0].start
    assert lowered.prompt.token_ids[:first] == joint[:first]


@pytest.mark.parametrize("tail", ["Q", "\n\nQ", "\n", ",", " "])
def test_what_follows_never_joins_the_last_span(model: Model, tail: str) -> None:
    alone = model.lower(user("D:", plus("aa", "bb"), "x"))
    lowered = model.lower(user("D:", plus("aa", "bb"), tail))
    assert model.spans(lowered) == model.spans(alone) == ["aa\n\n", "bb\n\n"]


def test_whole_messages_are_spans_with_header_and_end(free_model: Model) -> None:
    model, template = free_model, free_model.template
    lowered = model.lower(seq(sys_("s"), plus(user("aa"), seq(user("b"), bot("c"))), user("Q")))

    def whole(role: str, text: str) -> str:
        return template.opening[role] + text + template.closing[role]  # type: ignore[index]

    assert model.spans(lowered) == [whole("user", "aa"), whole("user", "b") + whole("assistant", "c")]
    assert lowered.prompt.token_ids == model.joint(
        ("system", "s"), ("user", "aa"), ("user", "b"), ("assistant", "c"), ("user", "Q")
    )
    assert [span.anchor.token_ids for span in lowered.prompt.spans] == [template.header("user")] * 2
    assert lowered.num_tokens_differing == 0


def test_bare_text_in_a_commute_is_one_message(free_model: Model) -> None:
    lowered = free_model.lower(seq(plus("aa", seq("b", "b")), "Q"))
    assert free_model.text(lowered.prompt.token_ids) == free_model.text(
        free_model.lower(seq(user(plus("aa", "bb")), user("Q"))).prompt.token_ids
    )
    assert free_model.spans(lowered) == ["aa\n\n", "bb\n\n"]


def test_text_beside_messages_is_a_message_each(chatml: Model) -> None:
    lowered = chatml.lower(seq(sys_("s"), plus("aa", user("b"), plus("c", "d")), "Q"))
    assert [text.count("<|im_start|>user\n") for text in chatml.spans(lowered)] == [1, 1, 1, 1]
    assert lowered.sources[3].path == "$.query.operands[1].operands[2].operands[1]"


def test_a_commute_inside_an_operand_is_its_text(model: Model) -> None:
    lowered = model.lower(user("D:", plus(seq("x", plus("y", "z", separator="; "), "w"), "aa"), "Q"))
    assert model.spans(lowered) == ["xy; z; w\n\n", "aa\n\n"]


def test_a_commute_inside_a_message_that_is_an_operand_is_its_text(free_model: Model) -> None:
    lowered = free_model.lower(seq(sys_("s"), plus(user("x", plus("y", "z", rung=MOVED)), user("aa")), user("Q")))
    assert len(lowered.prompt.spans) == 2
    content = "xy\n\nz\n\n" if free_model.family.name != "llama3" else "xy\n\nz"  # a whole message is trimmed alike
    template = free_model.template
    assert free_model.spans(lowered)[0] == template.opening["user"] + content + template.closing["user"]


def test_a_commute_in_a_commute_is_flattened(model: Model) -> None:
    flat = model.lower(user("D:", plus("a", "b", "c", "d"), "Q"))
    nested = model.lower(user("D:", plus(plus("a", plus("b")), plus("c"), "d"), "Q"))
    assert nested.prompt == flat.prompt


def test_a_commute_in_a_commute_keeps_its_own_options(model: Model) -> None:
    inner = plus("b", "c", rung=repair(1), anchor="none", separator="\n")
    lowered = model.lower(user("D:", plus("a", inner, plus("e", rung=EXACT), "f", rung=MOVED), "Q"))
    assert model.spans(lowered) == ["a\n\n", "b\n", "c\n", "f\n\n"]
    assert [(source.rung, source.anchor) for source in lowered.sources] == [
        (MOVED, "header"),
        (repair(1), "none"),
        (repair(1), "none"),
        (MOVED, "header"),
    ]


def test_an_exact_commute_leaves_inner_ones_their_spans(model: Model) -> None:
    inner = plus("b", "c", rung=MOVED)
    lowered = model.lower(user("D:", plus("a", seq("x", inner), inner, rung=EXACT), "Q"))
    assert model.spans(lowered) == ["b\n\n", "c\n\n", "b\n\n", "c\n\n"]
    plain = model.lower(user("D:", plus("a", plus("b"), rung=EXACT), "Q"))
    assert plain.prompt.spans == ()


def test_an_exact_commute_of_messages(free_model: Model) -> None:
    lowered = free_model.lower(seq(plus(user("a"), user("b", plus("c", rung=MOVED), "d"), rung=EXACT), user("Q")))
    assert free_model.spans(lowered) == ["c\n\n"]


@pytest.mark.parametrize("num_tokens", [1, 2, 1000])
def test_repair_is_at_most_the_span(model: Model, num_tokens: int) -> None:
    lowered = model.lower(user("D:", plus("one two three", "four"), "Q"), rung=repair(num_tokens))
    assert [span.repair for span in lowered.prompt.spans] == [
        min(num_tokens, len(span)) for span in lowered.prompt.spans
    ]
    assert [source.rung for source in lowered.sources] == [repair(num_tokens)] * 2


def test_the_head_as_anchor_holds_all_that_comes_before(model: Model) -> None:
    query = seq(sys_("s"), user("D:", plus("aa", "bb"), "and:", plus("cc", "dd"), "Q"))
    prompt = model.lower(query, anchor="head").prompt
    one, two, three, four = prompt.spans
    assert one.anchor == two.anchor == SpanPrompt(prompt.token_ids[: one.start])
    assert three.anchor == four.anchor == SpanPrompt(prompt.token_ids[: three.start], (one, two))


def test_no_anchor(model: Model) -> None:
    lowered = model.lower(user("D:", plus("aa", anchor="none"), "Q"))
    assert [span.anchor for span in lowered.prompt.spans] == [NO_ANCHOR]


def test_the_header_of_the_message_that_a_span_stands_in(model: Model) -> None:
    lowered = model.lower(seq(sys_("S:", plus("aa")), user("hi"), bot("B:", plus("bb")), user("Q")))
    anchors = [span.anchor.token_ids for span in lowered.prompt.spans]
    assert anchors == [model.template.header("system"), model.template.header("assistant")]


def test_turns_with_a_group_of_documents_each(model: Model) -> None:
    turns = [part for n in "123" for part in (user("D:", plus("a" + n, "b" + n), "Q" + n), bot("A" + n))]
    lowered = model.lower(seq(sys_("s"), *turns[:-1]))
    assert model.spans(lowered) == [f"{x}{n}\n\n" for n in "123" for x in "ab"]
    text = [("user" if i % 2 == 0 else "assistant") for i in range(5)]
    said = ["D:a1\n\nb1\n\nQ1", "A1", "D:a2\n\nb2\n\nQ2", "A2", "D:a3\n\nb3\n\nQ3"]
    joint = model.joint(("system", "s"), *zip(text, said, strict=True))
    assert model.text(lowered.prompt.token_ids) == model.text(joint)


def test_white_space_of_a_span_at_the_end_of_a_message_is_kept(llama3: Model) -> None:
    lowered = llama3.lower(seq(user(" ", plus("\naa", "bb"), "\n"), user("Q")))
    assert llama3.spans(lowered) == ["\naa\n\n", "bb\n\n"]
    assert lowered.notes == (
        "$.query.operands[0]: the chat template trims white space at the ends of a message; that of a span is kept, "
        "so that its tokens do not depend on its place",
    )
    text = llama3.text(lowered.prompt.token_ids)
    assert text.split("<|eot_id|>")[0].endswith("<|end_header_id|>\n\n\naa\n\nbb\n\n")  # what is around is trimmed


def test_a_prompt_keeps_its_first_and_last_token_out_of_spans() -> None:
    tokenizer = TinyTokenizer("{% for m in messages %}{{ m.content }}{% endfor %}", ["<x>"])
    model = Model(FAMILIES["chatml"], tokenizer, ChatTemplate(tokenizer))
    lowered = model.lower(user(plus("one two three", "four five", separator="")))
    assert model.spans(lowered) == [" two three", "four"]
    assert model.lower(user(plus("one", separator=""))).prompt.spans == ()
    head = model.lower(user(plus("one two", "x y")), anchor="head").prompt
    assert {span.anchor for span in head.spans} == {SpanPrompt(head.token_ids[:1])}


def test_messages_first_of_all(chatml: Model) -> None:
    """Nothing stands before the first operand: its first token stays outside."""
    lowered = chatml.lower(seq(plus(user("aa"), user("bb")), "Q"))
    assert chatml.spans(lowered) == ["user\naa<|im_end|>\n", "<|im_start|>user\nbb<|im_end|>\n"]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (seq(), r"^\$\.query: the query is empty"),
        (seq("", seq("")), r"^\$\.query: the query is empty"),
        (plus(""), r"^\$\.query: the query is empty"),
        (user("a", plus()), r"^\$\.query\.parts\[1\]: commute has no operands; give it some, or leave it out"),
        (seq("a", plus()), r"^\$\.query\.operands\[1\]: commute has no operands"),
        (user("a", seq(user("b"))), r"^\$\.query\.parts\[1\]\.operands\[0\]: a user message stands inside a message"),
        (seq("a", Retrieve(print, "b")), r"^\$\.query\.operands\[1\]: this retrieve is not answered yet; bind\(\)"),
        (user("a", Retrieve(print, "b")), r"^\$\.query\.parts\[1\]: this retrieve is not answered yet"),
    ],
)
def test_what_cannot_be_a_prompt(chatml: Model, query: object, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        chatml.lower(query)  # type: ignore[arg-type]


def test_operands_that_turn_out_empty_leave_no_trace(model: Model) -> None:
    lowered = model.lower(user("D:", plus("", seq(), seq("", plus(""))), "Q"))
    assert lowered.prompt.token_ids == model.joint(("user", "D:Q"))
