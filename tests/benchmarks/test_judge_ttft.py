"""The judge benchmark on simulated engines: candidates, leases, and what comes out."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from benchmarks import _judge
from benchmarks._engines import Answer, Pair
from benchmarks._judge import (
    ALL,
    FULL,
    LEASED,
    RELEASED,
    REPAIR_16,
    STOCK,
    Candidates,
    Contestant,
    Record,
    inner_query,
    outer_head,
    outer_prompt,
    run_round,
)
from benchmarks._judge_report import COLUMNS, figures, label, notes, panels, rows
from spanflow.engine.protocol import Engine, SpanReport, Usage
from spanflow.lowering.lower import Generated
from spanflow.lowering.prompt import SpanPrompt

FANOUTS = (1, 3, 6)
Records = dict[tuple[int, Contestant], Record]


async def measured(pair: Pair, temperature: float, rounds: int = 2) -> tuple[Records, Candidates]:
    keys = [(fanout, who) for fanout in FANOUTS for who in (STOCK, LEASED, REPAIR_16)]
    records = {key: Record() for key in (*keys, (6, FULL), (6, RELEASED))}
    made = Candidates()
    for number in range(rounds):
        await run_round(
            pair, number, temperature, records, made, fanouts=FANOUTS, who=ALL, num_outers=2, max_tokens=40, seed=5
        )
    return records, made


@pytest.mark.parametrize("temperature", [0.8, 0.0])
async def test_leased_candidates_are_hits(pair: Pair, temperature: float) -> None:
    records, made = await measured(pair, temperature)
    for fanout in FANOUTS:
        for who in (LEASED, REPAIR_16):
            answers = [answer for round_ in records[fanout, who].outers for answer in round_]
            assert [len(answer.spans) for answer in answers] == [fanout] * 4
            assert all(answer.num_hit == fanout for answer in answers)
        assert all(answer.usage.cached == 0 for round_ in records[fanout, STOCK].outers for answer in round_)
    assert made.num == made.num_same == 12
    assert made.distinct == ([6, 6] if temperature else [1, 1])


async def test_without_leases_candidates_are_computed_again(pair: Pair) -> None:
    records, _ = await measured(pair, 0.8)
    released = [answer for round_ in records[6, RELEASED].outers for answer in round_]
    leased = [answer for round_ in records[6, LEASED].outers for answer in round_]
    assert len(released) == 2
    (full,) = {answer.spans for round_ in records[6, FULL].outers for answer in round_}
    assert full == ()
    assert max(a.num_hit for a in released) < 6
    assert min(a.usage.internal for a in released) > max(a.usage.internal for a in leased)
    assert (await pair.ours.audit())["leases"] == 0


async def test_stock_and_ours_are_asked_the_same(pair: Pair) -> None:
    inner = inner_query(0, 3, 0.8, 40)
    answers = [Generated(SpanPrompt((2, 3, 4)), (9 + n, 10 + n), "") for n in range(3)]
    prompt = outer_prompt(pair.template, inner, answers, "Case 1.")
    repaired = outer_prompt(pair.template, inner, answers, "Case 1.", REPAIR_16.rung)
    other = outer_prompt(pair.template, inner, answers, "Case 2.")
    assert prompt.token_ids == repaired.token_ids != other.token_ids
    assert [span.is_generated for span in prompt.spans] == [True] * 3
    assert {span.repair for span in prompt.spans} == {0}
    assert all(span.repair == min(16, len(span)) for span in repaired.spans)
    assert [prompt.tokens(span)[-2:] for span in prompt.spans] == [(9, 10), (10, 11), (11, 12)]


async def test_all_are_compared_with_full_attention_over_the_same_tokens(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bool, SpanPrompt]] = []
    ask = pair.ask

    async def noted(engine: Engine, prompt: SpanPrompt, **options: Any) -> Answer:
        asked.append((engine is pair.stock, prompt))
        return await ask(engine, prompt, **options)

    monkeypatch.setattr(pair, "ask", noted)
    who = (STOCK, LEASED, REPAIR_16)
    records = {(3, one): Record() for one in who}
    await run_round(pair, 0, 0.8, records, Candidates(), fanouts=(3,), who=who, num_outers=2, max_tokens=40, seed=5)
    on_stock = [prompt.token_ids for of_stock, prompt in asked if of_stock]
    assert {prompt.token_ids for of_stock, prompt in asked if not of_stock} == set(on_stock)
    assert len(on_stock) == 4, "what stock was asked already is not asked again"
    assert all(len(records[3, one].same) == 2 for one in (LEASED, REPAIR_16))


async def test_heads_are_new_and_of_one_length(pair: Pair) -> None:
    inner, answers = inner_query(0, 1, 0.8, 40), [Generated(SpanPrompt((2, 3, 4)), (9, 10), "")]
    seen: list[tuple[int, ...]] = []
    for temperature, *place in itertools.product((0.8, 0.0), (0, 1), (1, 24), (0, 12), (5, 6)):
        prompts = {
            who: outer_prompt(pair.template, inner, answers, outer_head(who, temperature, *place)) for who in ALL
        }
        assert len({prompt.spans[0].start for prompt in prompts.values()}) == 1
        assert len({len(outer_head(who, temperature, *place)) for who in ALL}) == 1, "a letter is a token anywhere"
        assert prompts[STOCK] == prompts[LEASED], "what is compared are the same tokens"
        seen += [prompts[who].token_ids for who in ALL if who is not STOCK]
    assert len(set(seen)) == len(seen) == 4 * 32


@pytest.mark.parametrize(
    ("alike", "found"),
    [((STOCK,), "stock"), ((FULL,), "ours, exact"), ((LEASED, REPAIR_16), r"ours, leased, repair\(16\)")],
    ids=["stock", "full", "repaired"],
)
async def test_a_head_that_is_in_the_cache_ends_the_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, alike: tuple[Contestant, ...], found: str
) -> None:
    """Of the same candidates, which some read behind one head and the others each behind a new one."""
    numbers = itertools.count()
    monkeypatch.setattr(_judge, "outer_head", lambda one, *_: "Case A." if one in alike else f"Case {next(numbers)}.")

    async def run() -> None:
        records = {(6, who): Record() for who in ALL}
        for _ in range(2):
            await run_round(
                pair, 0, 0.0, records, Candidates(), fanouts=(6,), who=ALL, num_outers=2, max_tokens=40, seed=5
            )

    expected = rf"^{found}, outer prompt 'Case A\.': \d+ tokens outside of spans were in the cache, expected at most"
    with pytest.raises(RuntimeError, match=expected):
        await run()


async def test_rows_and_figures_of_a_run(pair: Pair) -> None:
    records, made = {}, {}
    for temperature in (0.8, 0.0):
        records[temperature], made[temperature] = await measured(pair, temperature)
    out = rows(records, made)
    assert len(out) == 2 * (3 * 3 + 2)
    assert set(COLUMNS) <= {key for row in out for key in row}
    assert all(isinstance(cell, str | int | float | None) for row in out for cell in row.values())
    found = figures(records)
    assert {f"outer_{fanout}_{t}" for fanout in FANOUTS for t in ("t08", "t0")} <= found.keys()
    assert {
        "outer_worst_t0",
        "outer_worst_t08",
        "same_pick_t08",
        "outer_released_6_t0",
        "outer_exact_6_t0",
    } <= found.keys()
    assert found["outer_worst_t0"] == min(found[f"outer_{fanout}_t0"] for fanout in FANOUTS)
    assert len(notes(records, made)) == 3
    assert [sorted(one.lines[LEASED.name]) for one in panels(records)] == [[1, 3, 6]] * 2


def test_temperatures_in_names() -> None:
    assert [label(t) for t in (0.8, 0.0, 1.0)] == ["t08", "t0", "t1"]


def test_lost_candidates_are_said() -> None:
    whole = SpanReport(8, 12, "computed", repaired=4)  # a short one under repair, which nobody looks for
    spans = (SpanReport(0, 4, "hit"), SpanReport(4, 8, "evicted"), whole)
    plain, lost = (Record([[Answer("a", 0.1, "", (1,), {}, Usage(10, 1), found)]]) for found in ((), spans))
    short = Record([[Answer("a", 0.1, "", (1,), {}, Usage(10, 1), (spans[0], whole))]])
    records = {0.8: {(2, STOCK): plain, (2, LEASED): lost, (2, RELEASED): lost, (2, REPAIR_16): short}}
    found = notes(records, {0.8: Candidates([70, 30], [2], 2, 1)})
    assert "candidates of 30 to 70 tokens (median 50); of those of a round at least 2 differ; 1 of 2" in found[1]
    assert "fan-out 2, ours, leased: 1 of 2 candidates were not in the cache" in found[2]
    assert len(found) == 3, "without leases nothing is expected to be there, and what is repaired whole is not lost"
