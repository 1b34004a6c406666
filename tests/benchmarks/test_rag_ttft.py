"""The retrieval benchmark on simulated engines: what is a hit, what is new, and what comes out."""

from __future__ import annotations

import argparse
import random
from typing import Any

import pytest

from benchmarks._documents import Document, build_documents, load_passages
from benchmarks._engines import Answer, Pair
from benchmarks._rag import (
    ALL,
    CANONICAL,
    CLOSED_BOOK,
    DEFAULT,
    FULL,
    MOVED_HEAD,
    MOVED_HEADER,
    REPAIR_16,
    STOCK,
    Contestant,
    Point,
    Record,
    head_of,
    labels,
    overhead_tokens,
    prompt_for,
    run_round,
)
from benchmarks._rag_report import COLUMNS, figures, move_share, notes, panels, quality, rows
from benchmarks.rag_ttft import GRID, grid
from spanflow.engine.protocol import SpanReport, SpanStatus, Usage

POINT = Point(1069, 4)


def documents(pair: Pair, count: int = 8) -> list[Document]:
    size = (POINT.num_tokens - overhead_tokens(pair.template)) // POINT.num_documents
    return build_documents(
        load_passages(None), size, count, lambda text: len(pair.template.pieces.encode_first(text)), random.Random(0)
    )


async def measured(pair: Pair, rounds: int = 2) -> dict[Contestant, Record]:
    records = {who: Record() for who in (*ALL, CLOSED_BOOK)}
    rng = random.Random(1)
    for _ in range(rounds):
        await run_round(pair, documents(pair), ALL, records, num_drawn=4, num_hits=3, num_questions=3, rng=rng)
    return records


async def test_prompts_have_the_wanted_length_and_one_span_a_document(pair: Pair) -> None:
    for seed in range(5):
        drawn = random.Random(seed).sample(documents(pair), POINT.num_documents)
        prompt = prompt_for(pair.template, MOVED_HEADER, drawn, "Who was it?")
        assert abs(len(prompt) - POINT.num_tokens) < 0.08 * POINT.num_tokens
        assert len(prompt.spans) == POINT.num_documents
        assert {span.anchor.token_ids for span in prompt.spans} == {pair.template.header("user")}
        assert {span.repair for span in prompt.spans} == {0}


async def test_all_contestants_are_given_the_same_tokens(pair: Pair) -> None:
    drawn = documents(pair)[:4]
    prompts = {who: prompt_for(pair.template, who, drawn, "Who?") for who in ALL}
    assert len({prompts[who].token_ids for who in ALL if who is not CANONICAL}) == 1
    assert sorted(prompts[CANONICAL].token_ids) == sorted(prompts[STOCK].token_ids)
    assert all(not prompts[who].spans for who in (STOCK, CANONICAL, FULL))
    assert {span.repair for span in prompts[DEFAULT].spans} == {32}
    assert {span.repair for span in prompts[REPAIR_16].spans} == {16}
    assert len(prompts[MOVED_HEAD].spans[0].anchor) > len(prompts[MOVED_HEADER].spans[0].anchor)


async def test_canonical_order_does_not_depend_on_the_order_given(pair: Pair) -> None:
    drawn = documents(pair)[:4]
    assert len({prompt_for(pair.template, CANONICAL, order, "Who?") for order in (drawn, drawn[::-1])}) == 1


async def test_hits_hit_and_misses_find_nothing(pair: Pair) -> None:
    records = await measured(pair)
    for who in ALL:
        record = records[who]
        assert [len(found) for found in record.hits] == ([3, 3] if who.has_spans else [1, 1])
        assert [len(found) for found in record.misses] == ([1, 1] if who.has_spans else [])
        for answers in record.hits:
            assert all(answer.num_hit == len(answer.spans) for answer in answers)
            assert all(answer.usage.internal == 0 for answer in answers)
        for answers in record.misses:
            assert all(answer.num_hit == 0 and answer.usage.internal > 900 for answer in answers)
    shared = len(head_of(pair.template, documents(pair)))
    assert all(answer.usage.cached <= shared for who in (STOCK, FULL) for (answer,) in records[who].hits)


async def test_what_is_found_does_not_depend_on_who_went_before(pair: Pair) -> None:
    """Nor on the rounds before: nobody finds what another contestant or round left."""
    usages = []
    for who in (ALL, ALL[::-1], (CANONICAL, STOCK, FULL)):
        records = {one: Record() for one in (*ALL, CLOSED_BOOK)}
        await run_round(
            pair, documents(pair), who, records, num_drawn=4, num_hits=3, num_questions=3, rng=random.Random(1)
        )
        of_all = {one: [records[one].hits, records[one].misses, records[one].repeats] for one in who}
        usages.append({one: [[a.usage for r in rounds for a in r] for rounds in of_all[one]] for one in who})
    assert usages[0] == usages[1]
    assert usages[2].items() <= usages[0].items()


@pytest.mark.parametrize(
    ("who", "found"),
    [
        ((STOCK,), r"stock, shuffled: \d+ tokens outside of spans were in the cache, expected at most \d+;"),
        ((FULL,), r"ours, exact: \d+ tokens outside of spans were in the cache, expected at most \d+;"),
        ((MOVED_HEADER,), "ours, moved behind header, new: 4 of 4 spans were in the cache, expected none;"),
    ],
    ids=["stock", "full", "moved"],
)
async def test_documents_that_another_round_left_end_the_run(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, who: tuple[Contestant, ...], found: str
) -> None:
    async def begin(*_: object) -> None:
        pass

    monkeypatch.setattr(pair, "begin", begin)

    async def run() -> None:
        records = {one: Record() for one in (*ALL, CLOSED_BOOK)}
        for _ in range(2):
            await run_round(
                pair, documents(pair), who, records, num_drawn=4, num_hits=3, num_questions=1, rng=random.Random(1)
            )

    with pytest.raises(RuntimeError, match=found):
        await run()


async def test_canonical_order_finds_what_earlier_prompts_left(pair: Pair) -> None:
    """Sorted prompts over documents of one pool begin alike more often than shuffled ones."""
    record, rng = Record(), random.Random(1)
    records = {CANONICAL: record, CLOSED_BOOK: Record()}
    for _ in range(6):
        await run_round(pair, documents(pair), (CANONICAL,), records, num_drawn=4, num_hits=1, num_questions=0, rng=rng)
    assert max(answer.usage.cached for (answer,) in record.hits) > POINT.num_tokens / POINT.num_documents


async def test_hits_come_in_orders_that_share_no_assembled_prefix(pair: Pair) -> None:
    """What is cached of a hit is moved, but for the head that all prompts share."""
    records = await measured(pair, rounds=1)
    for answer in records[MOVED_HEADER].hits[0]:
        moved = sum(span.moved for span in answer.spans)
        assert 0 <= answer.usage.cached - moved < 64


async def test_each_contestant_answers_the_same_questions(pair: Pair) -> None:
    records = await measured(pair, rounds=1)
    assert len({tuple(map(len, records[who].likelihoods)) for who in (*ALL, CLOSED_BOOK)}) == 1
    assert all(len(firsts) == 3 for firsts in records[STOCK].firsts)
    assert all(
        value in (-0.7, -1.4) or -1.4 < value < -0.7 for found in records[DEFAULT].likelihoods for value in found
    )


async def test_documents_without_questions_are_measured_too(pair: Pair) -> None:
    plain = [Document(document.text, ()) for document in documents(pair)]
    records = {who: Record() for who in (*ALL, CLOSED_BOOK)}
    await run_round(pair, plain, ALL, records, num_drawn=4, num_hits=1, num_questions=3, rng=random.Random(0))
    found = {POINT: records}
    assert "hit_1k_moved" in figures(found)
    assert all("kept" not in row for row in rows(found))


async def test_rows_and_figures_of_a_run(pair: Pair) -> None:
    records = {POINT: await measured(pair)}
    out = rows(records)
    names = [(row["contestant"], row.get("cache")) for row in out]
    assert (STOCK.name, "recomputed") in names
    assert (DEFAULT.name, "hit") in names
    assert (DEFAULT.name, "new") in names
    assert (CLOSED_BOOK.name, None) in names
    assert len(names) == len(set(names)) == 3 + 2 * 4 + 2  # the exact rung is measured on a prefix hit too
    assert all(isinstance(cell, str | int | float | None) for row in out for cell in row.values())
    assert set(COLUMNS) <= {key for row in out for key in row}
    found = figures(records)
    assert {"hit_1k_moved", "hit_1k_default", "miss_1k", "moves_share_1k"} <= found.keys()
    assert len(notes(records)) == 3
    (panel,) = panels(records)
    assert list(panel.lines["stock, shuffled"]) == [1069]


def answer(ttft: float, statuses: str = "") -> Answer:
    names: dict[str, SpanStatus] = {"h": "hit", "e": "evicted", "n": "new", "c": "computed"}
    spans = tuple(SpanReport(n, n + 1, names[status]) for n, status in enumerate(statuses))
    return Answer("a", ttft, "", (1,), {}, Usage(1000, 1, 900), spans)


def records_by_hand() -> dict[Point, dict[Contestant, Record]]:
    return {
        POINT: {
            STOCK: Record(
                [[answer(2.0)], [answer(4.0)]], likelihoods=[[-2.0], [-2.0]], firsts=[[{5: 1.0}], [{6: 1.0}]]
            ),
            MOVED_HEADER: Record(
                [[answer(0.1, "hh"), answer(0.2, "hh"), answer(0.3, "hh")], [answer(0.4, "he")]],
                [[answer(3.0)], [answer(2.0)]],
                [0.05, 0.1],
                [[-2.5], [-2.5]],
                [[{5: 1.0}], [{6: 0.5, 9: 0.5}]],
            ),
            CLOSED_BOOK: Record(likelihoods=[[-4.0], [-4.0]], firsts=[[{1: 1.0}], [{1: 1.0}]]),
        }
    }


def test_figures_by_hand() -> None:
    found = figures(records_by_hand())
    assert found["hit_1k_moved"] == pytest.approx(10.0)
    assert found["miss_1k"] == pytest.approx((1.5 + 0.5) / 2)
    assert found["moves_share_1k"] == pytest.approx(0.25)
    assert found["kept_1k_moved"] == pytest.approx(0.75)


def test_quality_by_hand() -> None:
    records = records_by_hand()[POINT]
    found = quality(records[MOVED_HEADER], records[STOCK], records[CLOSED_BOOK])
    assert found == {"likelihood": -2.5, "kept": 0.75, "distance": 0.25, "num_answers": 2}
    assert quality(records[STOCK], records[STOCK], records[CLOSED_BOOK])["kept"] == 1
    useless = quality(records[MOVED_HEADER], records[CLOSED_BOOK], records[CLOSED_BOOK])
    assert useless["kept"] is None, "documents that add nothing keep no share"


def test_hits_that_were_no_hits_are_said() -> None:
    assert "1k, ours, moved behind header: 1 of 8 spans of hits were not in the cache" in notes(records_by_hand())[-1]
    assert move_share(Record()) is None


def test_a_span_that_is_repaired_whole_is_no_lost_hit() -> None:
    records = records_by_hand()
    records[POINT][REPAIR_16] = Record([[answer(0.1, "hc")]])
    assert not any(REPAIR_16.name in note for note in notes(records))
    records[POINT][REPAIR_16] = Record([[answer(0.1, "hcen")]])
    assert f"1k, {REPAIR_16.name}: 2 of 3 spans of hits were not in the cache" in notes(records)[-1]


def test_the_grid_is_read_and_named() -> None:
    three = (Point(1069, 4), Point(2097, 8), Point(4133, 12))
    assert grid("1069/4, 2097/8,4133/12") == three
    assert grid("1069/4") == grid("1069x4")
    assert grid("1069, 2097x4,8") == (Point(1069, 4), Point(1069, 8), Point(2097, 4), Point(2097, 8))
    assert grid(",".join(map(str, GRID))) == GRID
    assert list(labels(three).values()) == ["1k", "2k", "4k"]
    assert list(labels(grid("1100/4,600/2")).values()) == ["1k", "600"]


def test_a_length_that_repeats_is_named_with_its_documents() -> None:
    assert [*labels(GRID).values()] == ["1k", "1069x8", "2097x4", "2k", "2097x12", "4133x4", "4133x8", "4k"]
    assert [*labels(grid("1600/4,1700/4,2097/8")).values()] == ["1600x4", "1700x4", "2k"]
    by_hand = records_by_hand()[POINT]
    records = {POINT: by_hand, Point(1069, 8): by_hand}
    found = figures(records)
    assert found["hit_1k_moved"] == found["hit_1069x8_moved"]
    assert {"miss_1k", "miss_1069x8", "moves_share_1069x8", "kept_1069x8_moved"} <= found.keys()
    assert {(row["label"], row["num_documents"]) for row in rows(records) if "count" in row} == {
        ("1k", 4),
        ("1069x8", 8),
    }
    assert "1k is 1069/4, 1069x8 is 1069/8 (tokens/documents)" in notes(records)[3]
    assert any(note.startswith("1069x8, ours, moved behind header: 1 of 8") for note in notes(records))


def test_a_plot_has_axes_for_each_length_that_has_several_points() -> None:
    by_hand = records_by_hand()[POINT]
    (one,) = panels({POINT: by_hand, Point(2097, 8): by_hand})
    assert list(one.lines["stock, shuffled"]) == [1069, 2097]
    several = panels(dict.fromkeys(GRID, by_hand))
    assert [list(panel.lines["stock, shuffled"]) for panel in several] == [[4, 8], [4, 8, 12], [4, 8, 12]]
    assert [panel.title for panel in several] == [f"retrieval, about {n} tokens" for n in (1069, 2097, 4133)]


@pytest.mark.parametrize(
    "text", ["1069", "1069/1", "100/4", "x/4", "1069/", "1069/4,1069/4", "1069x4,4", "1069x4,12", "1069/4x8", "1069x"]
)
def test_a_bad_grid_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        grid(text)


def test_contestants_have_names_of_their_own() -> None:
    names: list[Any] = [who.name for who in ALL]
    assert len(set(names)) == len(ALL)
