"""Rounds of retrieval prompts: who is measured, on which documents, in which order, and how good the answers are."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import mean

from benchmarks._documents import Asked, Document
from benchmarks._engines import Answer, Pair, check_found, plain
from benchmarks._measure import rotated_orders
from spanflow.api.combinators import commute, fragment, generate, seq, system, user
from spanflow.ir.fidelity import DEFAULT_RUNG, EXACT, MOVED, Anchor, Rung, repair
from spanflow.lowering.lower import lower
from spanflow.lowering.prompt import SpanPrompt
from spanflow.lowering.template import ChatTemplate
from spanflow.runner.options import DEFAULT_ANCHOR

#: Of the likeliest next tokens so many are looked at; an answer's token that is not among them counts as the last.
TOP_TOKENS = 200
#: Of an accepted answer so many tokens are looked at.
ANSWER_TOKENS = 6
#: So many prompts over other documents, sorted as well, are run before one in canonical order is measured.
NUM_EARLIER = 2
_SYSTEM = "Answer the question with a few words from the documents."


@dataclass(frozen=True, slots=True)
class Point:
    """A size of prompts: about `num_tokens` in all, with so many documents."""

    num_tokens: int
    num_documents: int

    @property
    def label(self) -> str:
        """The length in thousands of tokens (below one thousand in tokens)."""
        return f"{self.num_tokens / 1000:.0f}k" if self.num_tokens >= 1000 else str(self.num_tokens)

    def __str__(self) -> str:
        return f"{self.num_tokens}/{self.num_documents}"


#: Each is called by its length alone, whatever else is measured.
NAMED = (Point(1069, 4), Point(2097, 8), Point(4133, 12))


def labels(points: Iterable[Point]) -> dict[Point, str]:
    """What stands for each point in the names of figures: its length, or where that repeats tokens and documents."""
    repeats = Counter(point.label for point in points)
    return {
        point: point.label
        if point in NAMED or repeats[point.label] == 1
        else f"{point.num_tokens}x{point.num_documents}"
        for point in points
    }


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who is measured. Without a rung it is stock vLLM; `canonical` sorts the documents of a prompt by their text."""

    name: str
    rung: Rung | None = None
    anchor: Anchor = DEFAULT_ANCHOR
    canonical: bool = False

    @property
    def has_spans(self) -> bool:
        """Whether KV is moved."""
        return self.rung is not None and self.rung != EXACT


STOCK = Contestant("stock, shuffled")
CANONICAL = Contestant("stock, canonical order", canonical=True)
FULL = Contestant("ours, exact", EXACT)
MOVED_HEADER = Contestant("ours, moved behind header", MOVED, "header")
MOVED_HEAD = Contestant("ours, moved behind head", MOVED, "head")
REPAIR_16 = Contestant("ours, repair(16)", repair(16), "header")
DEFAULT = Contestant(f"ours, {DEFAULT_RUNG} (default)", DEFAULT_RUNG, DEFAULT_ANCHOR)
#: The questions alone: what the model knows without any document. For likelihoods only.
CLOSED_BOOK = Contestant("stock, no documents")
#: Stock and ours alternate.
ALL = (STOCK, MOVED_HEADER, CANONICAL, DEFAULT, FULL, MOVED_HEAD, REPAIR_16)
QUICK = (STOCK, MOVED_HEADER, FULL, DEFAULT)


@dataclass
class Record:
    """What was measured of one contestant at one point: one entry a round in each list.

    `hits` have all documents' KV in the cache, `misses` none of it; a contestant without spans has `hits` alone.
    `repeats` (of the exact rung) have the documents in the order of the prompt before, as a prefix that is in the
    cache: as fast as it can be, where nothing has to be moved. `move_seconds` is what moves took of a hit.
    `likelihoods` has, for each question of a round, the log-likelihood per token of its accepted answer, and `firsts`
    the probabilities of an answer's likeliest first tokens.
    """

    hits: list[list[Answer]] = field(default_factory=list)
    misses: list[list[Answer]] = field(default_factory=list)
    move_seconds: list[float] = field(default_factory=list)
    likelihoods: list[list[float]] = field(default_factory=list)
    firsts: list[list[dict[int, float]]] = field(default_factory=list)
    repeats: list[list[Answer]] = field(default_factory=list)


def rag_prompt(
    template: ChatTemplate, documents: Sequence[Document], question: str, rung: Rung, anchor: Anchor
) -> SpanPrompt:
    """The prompt of one question over documents, which commute."""
    operands = [fragment(document.text) for document in documents]
    words = f"Question: {question}\nAnswer with a few words."
    asking = user("Documents:\n\n", commute(*operands), words) if operands else user(words)
    query = generate(seq(system(_SYSTEM), asking))
    return lower(query.query, template, generated={}, rung=rung, anchor=anchor).prompt


def prompt_for(template: ChatTemplate, who: Contestant, documents: Sequence[Document], question: str) -> SpanPrompt:
    """The prompt that a contestant is given; all are given the same tokens, but for the order of documents."""
    order = sorted(documents, key=lambda document: document.text) if who.canonical else documents
    spans = rag_prompt(template, order, question, who.rung if who.rung and who.has_spans else MOVED, who.anchor)
    return spans if who.has_spans else plain(spans)


def head_of(template: ChatTemplate, documents: Sequence[Document]) -> SpanPrompt:
    """What all prompts begin with, up to their first document."""
    prompt = rag_prompt(template, documents, "Who was it?", MOVED, "header")
    return SpanPrompt(prompt.token_ids[: prompt.spans[0].start])


def overhead_tokens(template: ChatTemplate) -> int:
    """How many tokens of a prompt are not documents'."""
    document = Document("Title\nText.", ())
    one, two = (len(rag_prompt(template, [document] * n, "Who was it?", MOVED, "header")) for n in (1, 2))
    return 2 * one - two


async def run_round(
    pair: Pair,
    documents: Sequence[Document],
    who: Sequence[Contestant],
    records: dict[Contestant, Record],
    *,
    num_drawn: int,
    num_hits: int,
    num_questions: int,
    rng: random.Random,
) -> None:
    """Draw documents and measure all contestants on them, in the order given.

    Each begins with an empty cache, so none finds what another one, or another round, has left there. Raises
    RuntimeError where one did.
    """
    drawn = rng.sample(documents, num_drawn)
    earlier = [rng.sample(documents, num_drawn) for _ in range(NUM_EARLIER)]
    orders = rotated_orders(drawn, min(1 + num_hits, num_drawn), rng)
    asked = [one for document in drawn for one in document.asked]
    rng.shuffle(asked)
    await _measure_quality(pair, CLOSED_BOOK, (), asked[:num_questions], records[CLOSED_BOOK])
    head = head_of(pair.template, drawn)
    for contestant in who:
        record = records[contestant]
        await pair.begin(pair.stock if contestant.rung is None else pair.ours, head)
        if contestant.has_spans:
            await _measure_spans(pair, contestant, orders, asked, record, len(head))
        elif contestant.canonical:
            for others in earlier:
                await pair.ask(pair.stock, prompt_for(pair.template, contestant, others, _question(asked, 1)))
            prompt = prompt_for(pair.template, contestant, drawn, _question(asked, 0))
            record.hits.append([await pair.ask(pair.stock, prompt)])
        else:
            await _measure_whole(pair, contestant, orders, asked, record, len(head))
        await _measure_quality(pair, contestant, orders[0], asked[:num_questions], record)


async def _measure_spans(
    pair: Pair,
    who: Contestant,
    orders: Sequence[Sequence[Document]],
    asked: Sequence[Asked],
    record: Record,
    num_shared: int,
) -> None:
    """A miss with no document in the cache, and hits in orders that were not seen, each with another question."""
    first, *others = (
        prompt_for(pair.template, who, order, _question(asked, place)) for place, order in enumerate(orders)
    )
    miss = await pair.ask(pair.ours, first)
    record.misses.append([check_found(miss, f"{who.name}, new", num_shared=num_shared, may_hit=False)])
    before = await pair.move_seconds()
    hits = [await pair.ask(pair.ours, prompt) for prompt in others]
    record.hits.append([check_found(hit, f"{who.name}, hit", num_shared=num_shared) for hit in hits])
    record.move_seconds.append((await pair.move_seconds() - before) / max(1, len(others)))


async def _measure_whole(
    pair: Pair,
    who: Contestant,
    orders: Sequence[Sequence[Document]],
    asked: Sequence[Asked],
    record: Record,
    num_shared: int,
) -> None:
    """Full attention with no document in the cache; of the exact rung, prefix hits too, each with another question."""
    engine = pair.stock if who.rung is None else pair.ours
    first, *others = (prompt_for(pair.template, who, orders[0], _question(asked, n)) for n in range(len(orders)))
    record.hits.append([check_found(await pair.ask(engine, first), who.name, num_shared=num_shared)])
    if who == FULL:
        record.repeats.append([await pair.ask(engine, prompt) for prompt in others])


async def _measure_quality(
    pair: Pair, who: Contestant, documents: Sequence[Document], asked: Sequence[Asked], record: Record
) -> None:
    """Likelihoods of accepted answers behind the first order, whose prefix is in the cache by now."""
    prompts, tokens = [], []
    for one in asked:
        prompt = prompt_for(pair.template, who, documents, one.question)
        answer = pair.template.pieces.encode_inner(one.answers[0])[:ANSWER_TOKENS]
        prompts += [SpanPrompt(prompt.token_ids + answer[:place], prompt.spans) for place in range(len(answer))]
        tokens.append(answer)
    engine = pair.stock if who.rung is None else pair.ours
    answers = iter(await pair.ask_all(engine, prompts, logprobs=TOP_TOKENS))
    found = [[(next(answers), token) for token in answer] for answer in tokens]
    record.likelihoods.append([mean(_likelihood(a.tops, token) for a, token in steps) for steps in found])
    record.firsts.append([{t: math.exp(value) for t, value in steps[0][0].tops.items()} for steps in found])


def _likelihood(tops: dict[int, float], token: int) -> float:
    return tops.get(token, min(tops.values()))


def _question(asked: Sequence[Asked], number: int) -> str:
    return asked[number % len(asked)].question if asked else f"What is said in document {number + 1}?"
