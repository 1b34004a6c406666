"""Sessions on the oracle with a tiny random model: what is taken over is what full attention would have computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engine.tiny_llama import save_tiny_model
from lowering.families import FAMILIES

from spanflow import Session, commute, generate, seq, system, user

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    from transformers import AutoTokenizer

    directory = save_tiny_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = FAMILIES["chatml"].text
    tokenizer.save_pretrained(directory)
    with Session(str(directory), engine="oracle", max_tokens=6) as session:
        yield session


def words(first: int, number: int = 12) -> str:
    return " ".join(f"w{(first + 7 * i) % 100}" for i in range(number))


def documents(order: list[int], **options: Any) -> Any:
    return generate(seq(system(words(1)), user(commute(*[words(i) for i in order], **options), words(3))), max_tokens=8)


def test_everything_repaired_is_full_attention(session: Session) -> None:
    for order in ([10, 20, 30], [30, 10, 20]):
        # Not the exact rung, which may put the documents into another order.
        plain = [f"{words(i)}\n\n" for i in order]
        exact = session.run(generate(seq(system(words(1)), user(*plain, words(3))), max_tokens=8))
        repaired = session.run(documents(order, rung="repair(1000)"))
        assert repaired.token_ids == exact.token_ids
        assert [(span.repaired, span.moved) for span in repaired.spans] == [(12, 0)] * 3
        assert exact.spans == ()


def test_moved_spans_are_hits_in_another_order(session: Session) -> None:
    first = session.run(documents([40, 50, 60], rung="moved"))
    second = session.run(documents([60, 40, 50], rung="moved"))
    assert [span.status for span in first.spans + second.spans] == ["new"] * 3 + ["hit"] * 3
    assert second.usage.cached == sum(span.moved for span in second.spans) == 36


def test_a_judge_takes_its_candidates_over_two_levels_deep(session: Session) -> None:
    candidates = generate(user(words(5)), n=3, temperature=1.0, max_tokens=5)
    inner = generate(seq(commute(candidates), user(words(7))), max_tokens=5)
    result = session.run(generate(seq(commute(inner, generate(user(words(9)))), user(words(11))), max_tokens=5))
    assert [span.status for span in result.spans] == ["hit", "hit"]
    assert all(span.moved == span.end - span.start - 1 and span.computed == 1 for span in result.spans)
    (middle,) = result.inner["$.query.operands[0].operands[0]"]
    assert [span.status for span in middle.spans] == ["hit"] * 3
    audit = session.on_host(lambda host: host.engine.audit())
    assert (audit["leases"], audit["running"]) == (0, 0)


def test_samples_are_drawn_with_their_own_seeds_and_the_same_again(session: Session) -> None:
    query = generate(user(words(5)), n=4, temperature=1.0, max_tokens=8)
    one, two = session.run(query), session.run(query)
    assert [sample.token_ids for sample in one.samples] == [sample.token_ids for sample in two.samples]
    assert len({sample.token_ids for sample in one.samples}) == 4
    other = session.run(query, seed=1)
    assert [sample.token_ids for sample in other.samples] != [sample.token_ids for sample in one.samples]


def test_an_explanation_agrees_with_the_run(session: Session) -> None:
    query = documents([41, 51, 61], rung="repair(4)")
    (explained,) = session.explain(query).generations
    result = session.run(query)
    assert explained.num_tokens == result.usage.prompt
    assert [(span.start, span.end) for span in explained.spans] == [(span.start, span.end) for span in result.spans]
    assert explained.all_hit is not None
    assert explained.all_hit.moved == result.usage.cached
    assert explained.all_hit.repaired == sum(span.repaired for span in result.spans)
