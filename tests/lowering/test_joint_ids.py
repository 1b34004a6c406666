"""Without spans, the ids are those of the model's own chat template, token for token."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering.conftest import Model
from lowering.trees import MARKED, PLAIN, bot, gen, plus, seq, sys_, user

from spanflow.ir.fidelity import EXACT, repair
from spanflow.ir.nodes import Fragment, Message, Seq, Text

QUICK = settings(max_examples=20, deadline=None)


def alternating(texts: list[str], system: str | None) -> list[tuple[str, str]]:
    head = [] if system is None else [("system", system)]
    return head + [("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(texts)]


def as_query(messages: list[tuple[str, str]]) -> Seq:
    return Seq(tuple(Message(role, (Text(text),)) for role, text in messages))  # type: ignore[arg-type]


@pytest.mark.parametrize("answer", ["no", " no", "No.\n", "Paris\n\n- one\n- two  "])
@pytest.mark.parametrize("system", [None, "Be brief.", "  Be brief.\n\n"])
def test_conversations(model: Model, answer: str, system: str | None) -> None:
    messages = alternating(["Is it?", answer, "\n\n Why?\n"], system)
    lowered = model.lower(as_query(messages))
    assert lowered.prompt.token_ids == model.joint(*messages)
    assert (lowered.prompt.spans, lowered.sources, lowered.num_tokens_differing, lowered.notes) == ((), (), 0, ())


@QUICK
@given(texts=st.lists(PLAIN, min_size=1, max_size=5), system=st.none() | PLAIN)
def test_random_conversations(model: Model, texts: list[str], system: str | None) -> None:
    messages = alternating(texts[: len(texts) - 1 + len(texts) % 2], system)  # the last word is the user's
    assert model.lower(as_query(messages)).prompt.token_ids == model.joint(*messages)


@QUICK
@given(messages=st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), PLAIN), min_size=1, max_size=5))
def test_random_roles(free_model: Model, messages: list[tuple[str, str]]) -> None:
    assert free_model.lower(as_query(messages)).prompt.token_ids == free_model.joint(*messages)


def test_parts_of_a_message_are_joined_as_they_are(model: Model) -> None:
    query = user("The ", seq("quick ", Fragment("brown"), ""), " fox", Fragment("."))
    assert model.lower(query).prompt.token_ids == model.joint(("user", "The quick brown fox."))


def test_bare_text_is_a_user_message(free_model: Model) -> None:
    lowered = free_model.lower(seq("", "one", Fragment("two"), seq(seq("three"))))
    assert lowered.prompt.token_ids == free_model.joint(("user", "one"), ("user", "two"), ("user", "three"))


def test_exact_has_no_spans_and_keeps_the_order(model: Model) -> None:
    query = user("Of these:\n", plus("b", "", "a", rung=EXACT, separator="; "), "which?")
    lowered = model.lower(query, rung=repair(4))
    assert lowered.prompt.spans == ()
    assert lowered.prompt.token_ids == model.joint(("user", "Of these:\nb; a; which?"))


def test_an_exact_session_has_no_spans_where_nothing_else_is_said(model: Model) -> None:
    lowered = model.lower(user(plus("a", "b"), "which?"), rung=EXACT)
    assert lowered.prompt.spans == ()
    assert lowered.prompt.token_ids == model.joint(("user", "a\n\nb\n\nwhich?"))


def test_empty_messages_stay_messages(free_model: Model) -> None:
    lowered = free_model.lower(seq(sys_(""), user("a"), bot(), user("b")))
    assert lowered.prompt.token_ids == free_model.joint(("system", ""), ("user", "a"), ("assistant", ""), ("user", "b"))


@QUICK
@given(text=MARKED)
def test_one_bos(model: Model, text: str) -> None:
    bos = model.template.bos
    ids = model.lower(seq(sys_("Be brief."), user(text, plus("a", text), "b"))).prompt.token_ids
    assert model.template.pieces.markers.get(bos, ids[0]) == ids[0]
    assert not bos or ids.count(ids[0]) == 1


def test_inner_generations_that_are_text_elsewhere_need_a_value(model: Model) -> None:
    from spanflow.errors import QueryError

    with pytest.raises(QueryError, match=r"\$\.query\.operands\[1\]: this inner generation has no value yet"):
        model.lower(seq(user("a"), gen("b")))
