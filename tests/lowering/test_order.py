"""Operands commute: whatever their order, they are the same spans."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st
from lowering.conftest import Model
from lowering.trees import MARKED, PLAIN, WORDS, bot, gen, plus, seq, sys_, user

from spanflow.ir.fidelity import Anchor
from spanflow.ir.nodes import Node
from spanflow.lowering.lower import Generated, Lowered
from spanflow.lowering.prompt import SpanPrompt, span_key

QUICK = settings(max_examples=20, deadline=None)
ANCHORS: st.SearchStrategy[Anchor] = st.sampled_from(["header", "head", "none"])
TEXTS = st.lists(PLAIN | WORDS | MARKED, min_size=1, max_size=5)


def keys(lowered: Lowered) -> list[bytes]:
    return [span_key(lowered.prompt, span) for span in lowered.prompt.spans]


@QUICK
@given(texts=TEXTS, data=st.data(), anchor=ANCHORS, before=PLAIN, behind=PLAIN)
def test_parts_of_a_message(
    model: Model, texts: list[str], data: st.DataObject, anchor: Anchor, before: str, behind: str
) -> None:
    """Also first or last in the message, where many templates trim white space."""
    other = data.draw(st.permutations(texts))
    one, two = (model.lower(seq(sys_("s"), user(before, plus(*t), behind)), anchor=anchor) for t in (texts, other))
    assert len(one.prompt.spans) == sum(map(bool, texts))
    assert Counter(keys(one)) == Counter(keys(two))
    # The same operand in the same place of the order has the same key.
    assert [k for _, k in sorted(zip(filter(None, texts), keys(one), strict=True))] == [
        k for _, k in sorted(zip(filter(None, other), keys(two), strict=True))
    ]


@QUICK
@given(texts=st.lists(PLAIN | MARKED, min_size=1, max_size=5), data=st.data(), anchor=ANCHORS)
def test_whole_messages(free_model: Model, texts: list[str], data: st.DataObject, anchor: Anchor) -> None:
    operands: list[Node] = [seq(user(text), bot("so")) if len(text) % 3 == 0 else user(text) for text in texts]
    other = data.draw(st.permutations(operands))
    one, two = (free_model.lower(seq(sys_("s"), plus(*o), user("Q")), anchor=anchor) for o in (operands, other))
    assert len(one.prompt.spans) == len(texts)
    assert Counter(keys(one)) == Counter(keys(two))


@QUICK
@given(texts=st.lists(WORDS, min_size=1, max_size=5), data=st.data())
def test_candidates(free_model: Model, texts: list[str], data: st.DataObject) -> None:
    inner = free_model.lower(user("go")).prompt
    end = free_model.template.end_of_turn_id
    answers = [Generated(inner, (*free_model.ids(text), end), text) for text in texts]  # type: ignore[arg-type]
    query = seq(sys_("s"), plus(gen(n=len(texts))), user("Q"))
    path = "$.query.operands[1].operands[0]"
    other = data.draw(st.permutations(answers))
    one, two = (free_model.lower(query, {path: tuple(a)}) for a in (answers, other))
    assert Counter(keys(one)) == Counter(keys(two))
    assert len(keys(one)) == len(texts)


@QUICK
@given(texts=st.lists(PLAIN | WORDS | MARKED, min_size=1, max_size=6))
def test_ids_of_joined_spans_are_the_join_of_their_ids(model: Model, texts: list[str]) -> None:
    lowered = model.lower(user("D:", plus(*texts), "Q"))
    alone = [model.lower(user("other: ", plus(text), "?")).prompt for text in texts if text]
    ids = [prompt.tokens(span) for prompt in alone for span in prompt.spans]
    spans = lowered.prompt.spans
    assert [lowered.prompt.tokens(span) for span in spans] == ids
    if spans:
        inside = lowered.prompt.token_ids[spans[0].start : spans[-1].end]
        assert inside == tuple(token for part in ids for token in part)


@QUICK
@given(texts=TEXTS, question=PLAIN | MARKED)
def test_the_question_changes_no_span(model: Model, texts: list[str], question: str) -> None:
    one = model.lower(user("D:", plus(*texts), question, "!"))
    two = model.lower(user("D:", plus(*texts), "Which?"))
    assert keys(one) == keys(two)
    assert [(s.start, s.end) for s in one.prompt.spans] == [(s.start, s.end) for s in two.prompt.spans]


def test_the_two_orders_of_the_papers_example(free_model: Model) -> None:
    """x[s, +[aa, bb], q] and x[s, +[bb, aa], q]."""
    one = free_model.lower(seq(sys_("s"), plus(user("aa"), user("bb")), user("q")))
    two = free_model.lower(seq(sys_("s"), plus(user("bb"), user("aa")), user("q")))
    assert keys(one) == keys(two)[::-1]
    assert one.prompt != two.prompt


def test_a_text_has_one_key_in_all_prompts_with_the_same_anchor(model: Model) -> None:
    one = model.lower(seq(sys_("s"), user("D:", plus("aa", "bb"), "Q")))
    two = model.lower(seq(sys_("other"), user("x"), bot("y"), user(plus("cc", "bb"))))
    assert keys(one)[1] == keys(two)[1]
    assert one.prompt.spans[0].anchor == SpanPrompt(model.template.header("user"))


def test_the_operands_of_a_mixed_commute_keep_their_keys(free_model: Model) -> None:
    answer = Generated(free_model.lower(user("go")).prompt, free_model.ids("no"), "no")
    label = seq(user("A:"), gen())
    for anchor in ("header", "head", "none"):
        one = free_model.lower(
            seq(sys_("s"), plus(label, user("b")), user("Q")),
            {"$.query.operands[1].operands[0].operands[1]": (answer,)},
            anchor=anchor,  # type: ignore[arg-type]
        )
        two = free_model.lower(
            seq(sys_("s"), plus(user("b"), label), user("Q")),
            {"$.query.operands[1].operands[1].operands[1]": (answer,)},
            anchor=anchor,  # type: ignore[arg-type]
        )
        assert Counter(keys(one)) == Counter(keys(two))
