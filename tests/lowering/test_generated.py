"""Answers of inner generations are taken over as the ids that were sampled."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering.conftest import Model
from lowering.families import FAMILIES, tiny
from lowering.tiny import TinyTokenizer
from lowering.trees import bot, gen, plus, seq, sys_, user

from spanflow.errors import QueryError
from spanflow.ir.fidelity import EXACT, MOVED, repair
from spanflow.ir.nodes import Chat, Text
from spanflow.lowering.lower import Generated, Lowered, SpanSource
from spanflow.lowering.prompt import Span, SpanPrompt, span_key
from spanflow.lowering.template import ChatTemplate

QUICK = settings(max_examples=20, deadline=None)
SAMPLED = st.lists(st.integers(0, 999), max_size=6).map(tuple)


def answer(model: Model, text: str, *, ended: bool = True, asked: str = "go") -> Generated:
    """An answer as the family's model would give it."""
    ids = model.ids(text) + ((model.template.end_of_turn_id,) if ended else ())
    return Generated(model.lower(user(asked)).prompt, ids, text)  # type: ignore[arg-type]


def judge(model: Model, *answers: Generated, rest: str = "Which?", **options: Any) -> Lowered:
    query = seq(sys_("Judge."), plus(gen(n=len(answers)), **options), user(rest))
    return model.lower(query, {"$.query.operands[1].operands[0]": answers}, rung=None)


@pytest.fixture
def plain(free_model: Model) -> Model:
    return free_model


def test_a_candidate_is_the_header_and_what_was_sampled(chatml: Model) -> None:
    given = answer(chatml, "Paris")
    lowered = judge(chatml, given)
    (span,) = lowered.prompt.spans
    header = chatml.ids("<|im_start|>assistant\n")
    assert lowered.prompt.tokens(span) == header + given.token_ids
    assert span == Span(span.start, span.end, SpanPrompt(given.prompt.token_ids[: -len(header)]), 0, len(header))
    assert lowered.prompt.token_ids == chatml.joint(("system", "Judge."), ("assistant", "Paris"), ("user", "Which?"))
    assert lowered.sources == (
        SpanSource("$.query.operands[1].operands[0]", "generated", MOVED, "prompt", len(header) + len(given.token_ids)),
    )
    assert lowered.notes == ()


def test_the_source_of_a_candidate_is_what_was_run(free_model: Model) -> None:
    """Anchor and span together are the inner prompt and its answer: nothing else has been computed there."""
    answers = [answer(free_model, "no"), answer(free_model, "Yes, it is.", ended=False), answer(free_model, "a\n\nb")]
    lowered = judge(free_model, *answers)
    assert len(lowered.prompt.spans) == 3
    for span, said in zip(lowered.prompt.spans, answers, strict=True):
        run = said.prompt.token_ids + said.token_ids
        assert span.anchor.token_ids + lowered.prompt.tokens(span) == run
        assert len(span.anchor) + span.num_taken == len(said.prompt)  # type: ignore[operator]


def test_the_prompt_reads_as_the_conversation(free_model: Model) -> None:
    for ended in (True, False):
        lowered = judge(free_model, answer(free_model, "one", ended=ended), answer(free_model, "two", ended=ended))
        joint = free_model.joint(("system", "Judge."), ("assistant", "one"), ("assistant", "two"), ("user", "Which?"))
        assert lowered.prompt.token_ids == joint


def test_many_candidates(free_model: Model) -> None:
    answers = [answer(free_model, f"candidate {n}") for n in range(24)]
    lowered = judge(free_model, *answers)
    assert len(lowered.prompt.spans) == len(lowered.sources) == 24


@pytest.mark.parametrize(("rung", "expected"), [(None, 0), (MOVED, 0), (repair(2), 2), (repair(99), 99)])
def test_repair_of_candidates_is_asked_for(chatml: Model, rung: Any, expected: int) -> None:
    (span,) = judge(chatml, answer(chatml, "Paris"), rung=rung).prompt.spans
    assert span.repair == min(expected, len(span))


@pytest.mark.parametrize(
    ("rung", "of_text", "of_answers"),
    [(None, 32, 0), (MOVED, 0, 0), (repair(3), 3, 3)],
)
def test_a_rung_of_the_session_holds_for_texts_and_answers(
    chatml: Model, rung: Any, of_text: int, of_answers: int
) -> None:
    query = seq(user("Read:", plus("a " * 40, "b " * 40)), plus(gen()), user("Which?"))
    lowered = chatml.lower(query, {"$.query.operands[1].operands[0]": (answer(chatml, "no " * 9),)}, rung=rung)
    assert [span.repair for span in lowered.prompt.spans] == [of_text, of_text, of_answers]
    assert [source.kind for source in lowered.sources] == ["text", "text", "generated"]


def test_exact_candidates_are_carried_without_spans(free_model: Model) -> None:
    lowered = judge(free_model, answer(free_model, "one"), rung=EXACT)
    assert lowered.prompt.spans == ()
    assert lowered.prompt.token_ids == judge(free_model, answer(free_model, "one")).prompt.token_ids
    query = seq(plus(gen()), user("Q"))
    given = {"$.query.operands[0].operands[0]": (answer(free_model, "one"),)}
    assert free_model.lower(query, given, rung=EXACT).prompt.spans == ()


def test_under_an_ordered_join_there_is_no_span(free_model: Model) -> None:
    query = seq(user("Ask"), gen(), user("Sure?"))
    lowered = free_model.lower(query, {"$.query.operands[1]": (answer(free_model, "Yes"),)})
    assert lowered.prompt.spans == ()
    assert lowered.prompt.token_ids == free_model.joint(("user", "Ask"), ("assistant", "Yes"), ("user", "Sure?"))


def test_an_answer_between_turns_of_any_family(model: Model) -> None:
    """Also where the template puts a space before an answer: the answer brings its own."""
    text = " Yes" if model.family.template == "mistral" else "Yes"
    given = answer(model, text)
    lowered = model.lower(seq(user("go"), gen(), user("Sure?")), {"$.query.operands[1]": (given,)})
    run = given.prompt.token_ids + given.token_ids
    if model.family.name != "qwen_quick":  # there the answer was sampled behind an empty thought
        assert lowered.prompt.token_ids[: len(run)] == run
    assert model.text(lowered.prompt.token_ids) == model.text(
        model.joint(("user", "go"), ("assistant", "Yes"), ("user", "Sure?"))
    )


def test_labels_beside_candidates_are_plain(free_model: Model) -> None:
    query = seq(sys_("s"), plus(seq(user("A:"), gen()), seq(user("B:"), gen()), user("C")), user("Q"))
    path = "$.query.operands[1].operands[{}].operands[1]"
    given = {path.format(i): (answer(free_model, text),) for i, text in enumerate(["one", "two"])}
    lowered = free_model.lower(query, given)
    assert [source.kind for source in lowered.sources] == ["generated", "generated", "text"]
    said = [("user", "A:"), ("assistant", "one"), ("user", "B:"), ("assistant", "two"), ("user", "C"), ("user", "Q")]
    assert lowered.prompt.token_ids == free_model.joint(("system", "s"), *said)


def test_candidates_inside_a_message(model: Model) -> None:
    """The way for templates whose roles alternate."""
    answers = (answer(model, "one"), answer(model, "two", ended=False))
    query = user("Judge:\n", plus(gen(n=2), "by hand"), "Which?")
    lowered = model.lower(query, {"$.query.parts[1].operands[0]": answers})
    assert model.spans(lowered) == ["one", "two", "by hand\n\n"]
    one, two, _ = lowered.prompt.spans
    assert (one.anchor, one.num_taken) == (answers[0].prompt, 0)
    assert (two.anchor, two.num_taken) == (answers[1].prompt, 0)
    text = model.text(model.joint(("user", "Judge:\none\n\ntwo\n\nby hand\n\nWhich?")))
    assert model.text(lowered.prompt.token_ids) == text


def test_an_answer_inside_a_message_and_outside_a_commute(model: Model) -> None:
    lowered = model.lower(user("It said: ", gen(), "."), {"$.query.parts[1]": (answer(model, "no"),)})
    assert lowered.prompt.spans == ()
    assert model.text(lowered.prompt.token_ids) == model.text(model.joint(("user", "It said: no.")))


def test_a_chat_stands_for_its_answer(chatml: Model) -> None:
    query = seq(plus(Chat((Text("a"),))), user("Q"))
    lowered = chatml.lower(query, {"$.query.operands[0].operands[0]": (answer(chatml, "x"),)})
    assert [source.kind for source in lowered.sources] == ["generated"]


@QUICK
@given(data=st.data(), sampled=SAMPLED)
def test_sampled_ids_survive(model: Model, data: st.DataObject, sampled: tuple[int, ...]) -> None:
    """Ids that do not come back from text, and control tokens among them; also halves of characters."""
    special = sorted(model.template.pieces.markers.values())
    mixed = [data.draw(st.sampled_from(special)) if token % 3 == 0 else token for token in sampled]
    given = Generated(model.lower(user("go")).prompt, tuple(mixed), "not what was sampled")
    said = tuple(mixed[:-1]) if mixed and mixed[-1] in model.template.end_ids else tuple(mixed)
    inside = model.lower(user("J:", plus(gen(), "x"), "Q"), {"$.query.parts[1].operands[0]": (given,)}).prompt
    assert [inside.tokens(s) for s in inside.spans if s.is_generated] == ([said] if said else [])
    if not model.family.takes_turns:
        lowered = judge(model, given).prompt
        assert [lowered.tokens(span)[span.num_taken :] for span in lowered.spans] in (
            [[given.token_ids], [said]] if said else [[]]
        )


@pytest.mark.parametrize("only_end", [False, True])
def test_an_answer_of_nothing(model: Model, only_end: bool) -> None:
    end = (model.template.end_of_turn_id,) if only_end else ()
    given = Generated(model.lower(user("go")).prompt, end, "")  # type: ignore[arg-type]
    lowered = model.lower(user("J:", plus(gen(), "x"), "Q"), {"$.query.parts[1].operands[0]": (given,)})
    assert model.spans(lowered) == ["x\n\n"]
    assert lowered.prompt.token_ids == model.lower(user("J:", plus("x"), "Q")).prompt.token_ids
    turns = model.lower(seq(user("go"), gen(), user("Q")), {"$.query.operands[1]": (given,)})
    assert turns.prompt.token_ids == model.joint(("user", "go"), ("assistant", ""), ("user", "Q"))
    if not model.family.takes_turns:
        lowered = judge(model, given, answer(model, "no"))
        assert len(lowered.prompt.spans) == 1
        joint = model.joint(("system", "Judge."), ("assistant", ""), ("assistant", "no"), ("user", "Which?"))
        assert lowered.prompt.token_ids == joint


def test_another_end_of_sequence_gives_way_to_the_templates(chatml: Model) -> None:
    template = ChatTemplate(chatml.tokenizer, end_ids=chatml.ids("<|endoftext|>"))
    given = Generated(chatml.lower(user("go")).prompt, chatml.ids("one<|endoftext|>"), "one")
    lowered = judge(chatml._replace(template=template), given)
    joint = chatml.joint(("system", "Judge."), ("assistant", "one"), ("user", "Which?"))
    assert lowered.prompt.token_ids == joint
    assert chatml.spans(lowered) == ["<|im_start|>assistant\none"]


def test_a_space_before_the_end_of_turn_is_the_templates_own() -> None:
    """An answer that ended with its token has no space there."""
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<s>[U] ' ~ m.content ~ ' [A]' }}"
        "{% else %}{{ ' ' ~ m.content ~ ' </s>' }}{% endif %}{% endfor %}"
    )
    tokenizer = TinyTokenizer(text, ["<s>", "</s>"], bos="<s>", eos="</s>")
    model = Model(FAMILIES["mistral"], tokenizer, ChatTemplate(tokenizer))
    query = seq(user("a"), gen(), user("b"))
    prompt = model.lower(user("a")).prompt
    ended = Generated(prompt, model.ids(" no</s>"), "no")
    assert model.text(model.lower(query, {"$.query.operands[1]": (ended,)}).prompt.token_ids) == (
        "<s>[U] a [A] no</s><s>[U] b [A]"
    )
    cut = Generated(prompt, model.ids(" no"), "no")
    assert model.text(model.lower(query, {"$.query.operands[1]": (cut,)}).prompt.token_ids) == (
        "<s>[U] a [A] no </s><s>[U] b [A]"
    )


def test_a_header_that_the_inner_prompt_does_not_end_with(make_model: Any) -> None:
    """With thinking off the model answers behind an empty thought, which no later prompt shows."""
    model = make_model("tiny", "qwen_quick")
    given = answer(model, "no")
    (span,) = judge(model, given).prompt.spans
    assert (span.num_taken, span.anchor) == (0, given.prompt)
    assert judge(model, given).prompt.tokens(span) == given.token_ids


def test_part_of_the_header_may_match(chatml: Model) -> None:
    short = SpanPrompt(chatml.ids("Q assistant\n"))
    header = chatml.ids("<|im_start|>assistant\n")
    num = next(n for n in range(len(header)) if header[-1 - n] != short.token_ids[-1 - n])
    (span,) = judge(chatml, Generated(short, chatml.ids("no"), "no")).prompt.spans
    assert 0 < num < len(header)
    assert span.num_taken == num
    assert span.anchor == SpanPrompt(short.token_ids[:-num])


def test_the_header_ends_where_spans_of_the_inner_prompt_begin(chatml: Model) -> None:
    header = chatml.ids("<|im_start|>assistant\n")
    inner = SpanPrompt((*chatml.ids("Q"), *header), (Span(1, 3, SpanPrompt((1,))),))
    (span,) = judge(chatml, Generated(inner, chatml.ids("no"), "no")).prompt.spans
    assert span.num_taken == len(header) - 2
    assert span.anchor == SpanPrompt(inner.token_ids[:3], inner.spans)


def test_candidates_first_of_all(chatml: Model) -> None:
    """The prompt's first token stays outside of the span, and is then part of its anchor."""
    given = answer(chatml, "no")
    prompt = chatml.lower(seq(plus(gen()), user("Q")), {"$.query.operands[0].operands[0]": (given,)}).prompt
    (span,) = prompt.spans
    assert span.start == 1
    assert span.anchor.token_ids + prompt.tokens(span) == given.prompt.token_ids + given.token_ids


def test_two_levels(free_model: Model) -> None:
    """The anchor of an outer candidate has the spans of the prompt that produced it."""
    inner = judge(free_model, answer(free_model, "one"), answer(free_model, "two")).prompt
    end = free_model.template.end_of_turn_id
    verdict = Generated(inner, (*free_model.ids("two"), end), "two")  # type: ignore[arg-type]
    prompt = judge(free_model, verdict, answer(free_model, "three")).prompt
    first, second = prompt.spans
    assert first.anchor.spans == inner.spans
    assert second.anchor.spans == ()
    assert first.anchor.token_ids + prompt.tokens(first) == inner.token_ids + verdict.token_ids


def test_candidates_that_are_equal_have_equal_keys(chatml: Model) -> None:
    prompt = judge(chatml, answer(chatml, "no"), answer(chatml, "no")).prompt
    assert len({span_key(prompt, span) for span in prompt.spans}) == 1


def test_a_template_that_would_rewrite_an_answer_is_noted(make_model: Any) -> None:
    model = make_model("tiny", "qwen")
    given = answer(model, "<think>\nhm\n</think>\n\nno")
    lowered = judge(model, given)
    assert [lowered.prompt.tokens(span)[span.num_taken :] for span in lowered.prompt.spans] == [given.token_ids]
    assert len(lowered.notes) == 1
    assert "would write generated answers in another way than they were sampled" in lowered.notes[0]


@pytest.mark.parametrize("number", [0, 2])
def test_one_answer_where_one_is_read(chatml: Model, number: int) -> None:
    answers = (answer(chatml, "x"),) * number
    with pytest.raises(
        QueryError, match=rf"^\$\.query\.operands\[1\]: a generate outside a commute stands for 1 answer, got {number}"
    ):
        chatml.lower(seq(user("a"), gen(n=2)), {"$.query.operands[1]": answers})
    inside = seq("x", gen(n=2))
    with pytest.raises(QueryError, match=r"^\$\.query\.parts\[0\]\.operands\[0\]\.operands\[1\]: a generate outside"):
        chatml.lower(user(plus(inside)), {"$.query.parts[0].operands[0].operands[1]": answers})


def test_no_value_names_what_is_known(chatml: Model) -> None:
    with pytest.raises(
        QueryError, match=r"\$\.query\.operands\[0\]: this inner generation has no value yet \(known: \$\.a\); run it"
    ):
        chatml.lower(seq(gen(), user("a")), {"$.a": (answer(chatml, "x"),)})


def test_roles_that_must_alternate_say_what_to_do() -> None:
    tokenizer = tiny(FAMILIES["gemma"])
    model = Model(FAMILIES["gemma"], tokenizer, ChatTemplate(tokenizer))
    with pytest.raises(QueryError, match=r"refuses these messages \(system, assistant, assistant, user\): Roles must"):
        judge(model, answer(model, "a"), answer(model, "b"))


def test_history_beside_candidates(chatml: Model) -> None:
    query = seq(user("hi"), bot("no"), plus(gen()), user("Q"))
    lowered = chatml.lower(query, {"$.query.operands[2].operands[0]": (answer(chatml, "no"),)})
    joint = chatml.joint(("user", "hi"), ("assistant", "no"), ("assistant", "no"), ("user", "Q"))
    assert lowered.prompt.token_ids == joint
