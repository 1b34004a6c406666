"""What stays in the pool and what goes, prompt by prompt, in the real scheduler and block pool."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from symbolic_prompts import ANSWER, BLOCK, HEADER, start

from spanflow.lowering.prompt import Span, SpanPrompt

pytestmark = pytest.mark.vllm


def one(engine: Any, prompt: SpanPrompt) -> list[str]:
    """Ask alone, check the answer; what became of each span."""
    name = engine.send(prompt)
    engine.finish()
    engine.check()
    statuses: list[str] = engine.statuses(name)
    return statuses


def corpus_prompt(documents: list[tuple[int, ...]], repair: int = 3, head: int = 5) -> SpanPrompt:
    ids: list[int] = [*range(700, 700 + head), *HEADER]
    spans = []
    for document in documents:
        spans.append(Span(len(ids), len(ids) + len(document), SpanPrompt(HEADER), repair))
        ids += document
    return SpanPrompt((*ids, *range(40, 50), *ANSWER), tuple(spans))


def test_sources_outlive_copies(model_dir: Path) -> None:
    """Prompts of four documents flow through a pool that holds the corpus and two prompts: no document is lost."""
    documents = [tuple(range(100 + 60 * n, 129 + 60 * n)) for n in range(12)]
    engine = start(model_dir, 1 + 2 * 12 + 2 * 10)
    order = random.Random(3)
    for at in range(0, 12, 4):
        assert one(engine, corpus_prompt(documents[at : at + 4])) == ["new"] * 4
    for _ in range(60):
        assert one(engine, corpus_prompt(order.sample(documents, 4))) == ["hit"] * 4


def test_a_follow_up_turn_finds_the_assembled_prompt(model_dir: Path) -> None:
    """Copies go first when memory is short, and not before: what was assembled is hit, not moved again."""
    engine = start(model_dir, 60)
    first = corpus_prompt([tuple(range(100, 150)), tuple(range(200, 240))])
    one(engine, first)
    counters = engine.scheduler.spans.counters
    moved, hits = counters["moved_tokens"], counters["hits"]
    one(engine, SpanPrompt((*first.token_ids, *range(30)), first.spans))
    # Only what fills no block is moved again; both are found.
    assert counters["moved_tokens"] - moved < BLOCK
    assert counters["hits"] - hits == 2


def test_the_hit_rate_does_not_decay(model_dir: Path) -> None:
    """1,000 prompts of 4 out of 40 documents in novel orders; the pool holds half of the documents.

    Rates of a hundred draws differ by chance: 0.05 are one and a half standard deviations."""
    documents = [tuple(range(100 + 60 * n, 129 + 60 * n)) for n in range(40)]
    engine = start(model_dir, 1 + 2 * 20 + 10, audit_steps=False)
    draw, orders = random.Random(11), dict[tuple[int, ...], None]()
    while len(orders) < 1000:
        orders[tuple(draw.sample(range(40), 4))] = None
    hits = [one(engine, corpus_prompt([documents[n] for n in order])).count("hit") for order in orders]
    second, last = sum(hits[100:200]) / 400, sum(hits[-100:]) / 400
    assert last > second - 0.05 > 0.1


def test_what_fits_once_is_moved_in_place(model_dir: Path) -> None:
    """A prompt and its sources do not fit together: the sources' blocks become the prompt's."""
    engine = start(model_dir, 14, max_model_len=208)
    documents = [tuple(range(100 + 60 * n, 140 + 60 * n)) for n in range(3)]
    prompt = corpus_prompt(documents)
    assert 2 * (len(prompt) // BLOCK) > 13
    name = engine.send(prompt)
    engine.finish()
    engine.check()
    assert engine.statuses(name) == ["new"] * 3
    assert any("in place" in why for why in engine.whys(name))
    assert engine.scheduler.spans.counters["taken_over"] > 0


@pytest.mark.parametrize("head", [5, 40, 61, 90])
@pytest.mark.parametrize("num_blocks", [14, 15, 18, 20, 22, 25])
def test_pools_of_any_size_serve_heads_of_any_length(model_dir: Path, num_blocks: int, head: int) -> None:
    """Blocks of a head that are adopted are in the free queue until then: they count among those that are wanted."""
    engine = start(model_dir, num_blocks, max_model_len=min(256, (num_blocks - 1) * BLOCK))
    documents = [tuple(range(100 + 60 * n, 140 + 60 * n)) for n in range(3)]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        prompt = corpus_prompt([documents[n] for n in order], head=head)
        if len(prompt) < engine.scheduler.max_model_len:
            one(engine, prompt)


def test_a_source_under_way_is_new_for_everybody(model_dir: Path) -> None:
    engine = start(model_dir, 120)
    documents = [tuple(range(100, 140)), tuple(range(200, 240))]
    names = [engine.send(corpus_prompt(documents[::step])) for step in (1, -1)]
    engine.finish()
    engine.check()
    assert [engine.statuses(name) for name in names] == [["new"] * 2] * 2
    assert engine.scheduler.spans.counters["sources"] == 3


def test_what_was_taken_over_is_found_where_it_is_now(model_dir: Path) -> None:
    """The source is gone, its copy in the prompt is not; after so many rotations it is computed anew."""
    engine = start(model_dir, 14, max_model_len=208)
    documents = [tuple(range(100 + 60 * n, 140 + 60 * n)) for n in range(3)]
    one(engine, corpus_prompt(documents))
    taken = engine.scheduler.spans.counters["taken_over"]
    assert taken > 0
    assert one(engine, corpus_prompt(documents[::-1])) == ["hit"] * 3
    engine.scheduler.spans.assembler.max_rotations = 0
    assert "evicted" in one(engine, corpus_prompt([documents[1], documents[0], documents[2]]))


def test_a_failed_comparison_at_start_up_reaches_the_client(model_dir: Path) -> None:
    """Keys that come out wrong turn spans off, and the probe's own answer says so."""
    engine = start(model_dir, 60)
    name = engine.send(SpanPrompt((*range(24), *range(24))), 4, probe=True)
    engine.step()
    engine.step()
    assert engine.scheduler.spans.probe.sent == {name}
    engine.scheduler.connector.unsupported = "a key differs by 5.0e-01"  # what the worker's word is taken for
    engine.finish()
    assert engine.answers(name)["unsupported"] == "a key differs by 5.0e-01"
    assert one(engine, corpus_prompt([tuple(range(100, 140))])) == ["unsupported"]


def test_a_comparison_that_was_not_made_is_none_that_went_well(model_dir: Path) -> None:
    """The probe's answer ended before the worker had said anything."""
    engine = start(model_dir, 60)
    asked = SpanPrompt((*range(24), *range(24)))
    name = engine.send(asked, 1, probe=True)
    engine.finish()
    assert engine.answers(name)["unsupported"] == "its keys were not compared"
    engine.scheduler.connector.is_judged = True
    name = engine.send(asked, 4, probe=True)
    engine.finish()
    assert engine.answers(name)["unsupported"] == ""


def test_what_was_taken_over_is_not_read_from_blocks_that_were_reused() -> None:
    from spanflow.engine.vllm.copies import Found, Relocated

    block = SimpleNamespace(block_hash="a")
    where = Relocated(10, 40, (block, block), ("a", "a"), 3, 100, 1)
    assert where.find(12, 20, 16) == Found((block,), 5, 112, 1)
    assert where.find(9, 20, 16) is None
    assert where.find(12, 41, 16) is None
    block.block_hash = "b"
    assert where.find(12, 20, 16) is None
