"""Options of a run, and what is kept of an answer's ids."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import Script, SpeakingTokenizer, register

from spanflow import QueryError, Session, commute, generate, repair, seq, user
from spanflow.ir.fidelity import MOVED
from spanflow.runner.ask import kept_ids
from spanflow.runner.options import RunOptions


def test_none_changes_nothing_where_none_means_the_default() -> None:
    options = RunOptions(rung=MOVED, max_tokens=7, timeout=3.0)
    assert options.changed({"rung": None, "anchor": None, "max_tokens": None, "on_error": None}) == options
    assert options.changed({"timeout": None}).timeout is None
    assert options.changed({"rung": "repair(4)", "anchor": "head"}).rung == repair(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rung": "sideways"}, "'sideways' is no rung"),
        ({"anchor": "sea"}, "'sea' is no anchor; known anchors: header, head, none"),
        ({"max_tokens": 0}, "max_tokens: must be a whole number at least 1, got 0"),
        ({"seed": -1}, "seed: must be a whole number at least 0, got -1"),
        ({"on_error": "panic"}, "on_error: 'panic' is no policy; known policies: 'fail', 'skip', 'retry'"),
        ({"timeout": 0}, "timeout: expected a number of seconds above 0, got 0"),
        ({"lease_seconds": 1e9}, "lease_seconds: expected a number of seconds above 0 and at most 86,400, got"),
        ({"num_retries": -1}, "num_retries: must be a whole number at least 0, got -1"),
        ({"priority": 1.5}, "priority: expected a whole number, got 1.5"),
        ({"salt": 3}, "salt: must be text, got 3"),
        ({"temprature": 1}, "a run has no option 'temprature'; its options: rung, anchor, max_tokens, seed, on_error"),
    ],
)
def test_a_wrong_option_is_refused_with_what_would_be_right(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QueryError) as caught:
        RunOptions().changed(changes)
    assert message in str(caught.value)


@given(st.lists(st.sampled_from([" one", " two", "\n", "!"]), max_size=8), st.integers(0, 40))
def test_kept_ids_are_the_longest_beginning_that_was_said(words: list[str], length: int) -> None:
    tokenizer = SpeakingTokenizer()
    ids = [tokenizer.encode(word, False)[0] for word in words]
    text = "".join(words)[:length]
    kept = kept_ids(tokenizer.decode, ids, text)
    assert kept == tuple(ids[: len(kept)])
    assert text.startswith(tokenizer.decode(kept))
    assert len(kept) == len(ids) or not text.startswith(tokenizer.decode(ids[: len(kept) + 1]))


def test_the_end_of_turn_stays_with_a_whole_answer() -> None:
    tokenizer = SpeakingTokenizer()
    ids = [*tokenizer.encode(" so it is", False), 1]

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    assert kept_ids(decode, ids, " so it is") == tuple(ids)
    assert kept_ids(decode, ids, " so it") == tuple(ids[:2])


@pytest.mark.parametrize(
    ("session", "run", "expected"),
    [
        (None, None, ["moved", "repair(32)"]),
        ("repair(2)", None, ["repair(2)", "repair(2)"]),
        (None, "repair(3)", ["repair(3)", "repair(3)"]),
        ("repair(2)", "moved", ["moved", "moved"]),
        ("exact", "moved", ["moved", "moved"]),
        ("moved", "exact", []),
    ],
)
def test_a_rung_holds_for_texts_and_for_answers(
    monkeypatch: pytest.MonkeyPatch, session: str | None, run: str | None, expected: list[str]
) -> None:
    register(monkeypatch)
    query = generate(seq(commute(generate(user("write"))), user(commute("one " * 40), "which?")))
    with Session("m", engine="scripted", script=Script(), rung=session) as s:
        result, explained = s.run(query, rung=run), s.explain(query, rung=run)
    assert [str(span.rung) for span in result.spans] == expected
    assert [str(span.rung) for span in explained.generations[-1].spans] == expected[1:]  # no answer is there yet
    assert explained.generations[0].is_leased == bool(expected)
