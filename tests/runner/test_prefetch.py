"""Documents are computed before they are asked for: while a judge's candidates are written, or by hand."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from scripted_engine import Script, register

from spanflow import EngineDied, QueryError, Session, commute, generate, retrieve, seq, system, user


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def session(script: Script, **options: Any) -> Session:
    return Session("m", engine="scripted", script=script, **options)


def test_documents_of_a_judge_are_prefetched_while_its_candidates_are_written() -> None:
    """Those behind a header, each once; what a question says is no span, and a single generation needs none of it."""
    documents = commute(retrieve(lambda query: ["one", "two", "one"], "?"), rung="moved")
    script = Script(seconds=0.05)
    with session(script) as s:
        s.run(generate(user(documents, "Plain?")))
        assert script.prefetched == []
        s.run(generate(seq(commute(generate(user("write"))), user(documents, "Which fits?"))))
    assert script.texts(script.prefetched) == ["<|im_start|>user\none\n\n", "<|im_start|>user\ntwo\n\n"]


def test_prefetch_asks_for_documents_only() -> None:
    """More than the window holds, at any depth, under the run's salt; behind the head it can't be known."""
    texts = [f"text {number} " * 100 for number in range(20)]
    script = Script(window=500)
    with session(script, rung="moved") as s:
        assert s.prefetch(generate(user(commute(*texts), "?")), salt="mine") == 20
        assert {request.salt for request in script.prefetched} == {"mine"}
        assert s.prefetch(generate(user(commute(*texts, anchor="head"), "?"))) == 0
        assert asyncio.run(s.aprefetch(generate(user(commute(*texts[:3]), "?")))) == 3
        assert s.prefetch(generate(user(commute(*texts[:3], "much too long " * 500), "?"))) == 3
    assert script.submitted == []


def test_what_is_beside_an_answer_is_no_document() -> None:
    """An operand of text and an answer has no text span, and none before the answer is there."""
    query = generate(user("J:", commute(seq("label: ", generate(user("go"))), "alone"), "?"))
    script = Script()
    with session(script, rung="moved") as s:
        assert s.prefetch(query) == 1
        (outer,) = [g for g in s.explain(query).generations if g.num_inner]
        assert [span.path for span in outer.spans] == ["$.query.parts[1].operands[1]"]
    assert script.texts(script.prefetched) == ["<|im_start|>user\nalone\n\n"]


def test_prefetch_says_what_is_wrong() -> None:
    with session(Script(unsupported="a reason")) as s:
        assert s.prefetch(generate(user(commute("one"), "?"))) == 0
    with session(Script(prefetch_error=EngineDied("gone"))) as s, pytest.raises(EngineDied, match="gone"):
        s.prefetch(generate(user(commute("one"), "?"), max_tokens=3), rung="moved")
    with session(Script()) as s, pytest.raises(QueryError, match="system"):
        s.prefetch(generate(seq(user("a"), user(system("b")))))  # type: ignore[arg-type]
