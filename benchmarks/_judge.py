"""Rounds of a judge: candidates of one prompt, and outer prompts that read the first few of them."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks._engines import Answer, Pair, check_found, plain
from benchmarks._measure import rank_agreement, total_variation
from spanflow.api.combinators import commute, generate, seq, system, user
from spanflow.engine.protocol import Engine, Lease
from spanflow.ir.fidelity import Rung, repair
from spanflow.ir.nodes import Generate
from spanflow.lowering.lower import Generated, lower
from spanflow.lowering.prompt import SpanPrompt
from spanflow.lowering.template import ChatTemplate
from spanflow.runner.options import DEFAULT_ANCHOR

#: Of an outer prompt's first token so many likelihoods are compared.
TOP_TOKENS = 20
#: Long enough for all outer prompts of a round; the round ends the leases itself.
_LEASE = Lease(consumers=1 << 20, seconds=3600.0)
_PLACES = (
    "an old lighthouse",
    "a railway station at night",
    "a market in the mountains",
    "a library by the sea",
    "a frozen harbour",
    "a garden on a roof",
    "a school in the desert",
    "a workshop for violins",
    "a ferry across a wide river",
    "a bakery before dawn",
)


@dataclass(frozen=True, slots=True)
class Contestant:
    """Who runs the outer prompt. `rung` is that of the candidates' join; None leaves it to the default."""

    name: str
    rung: Rung | None = None


STOCK = Contestant("stock")
LEASED = Contestant("ours, leased")
REPAIR_16 = Contestant("ours, leased, repair(16)", repair(16))
#: Full attention on our engine, which must be as fast as stock, and an ablation.
FULL = Contestant("ours, exact")
RELEASED = Contestant("ours, without leases")
LARGEST_ONLY = frozenset((FULL, RELEASED))
ALL = (STOCK, LEASED, REPAIR_16, FULL, RELEASED)
QUICK = (STOCK, LEASED, RELEASED)
#: What tells the heads of contestants on one engine apart, a token each. Stock is asked the same as ours.
_LETTERS = {STOCK: "A", LEASED: "A", REPAIR_16: "B", FULL: "C", RELEASED: "D"}


@dataclass
class Record:
    """What was measured of one contestant at one fan-out and temperature: one entry a round, or an outer prompt.

    `same` says whether the outer prompt's first token is that of full attention, `distances` how far the two
    distributions are apart (total variation), `agreements` how alike they rank the likeliest tokens (Kendall's tau).
    """

    outers: list[list[Answer]] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    distances: list[float] = field(default_factory=list)
    agreements: list[float] = field(default_factory=list)


@dataclass
class Candidates:
    """What was generated on the way: lengths in tokens of our candidates, how many differ, and how many are stock's
    too; seconds that all candidates of a round took."""

    lengths: list[int] = field(default_factory=list)
    distinct: list[int] = field(default_factory=list)
    num: int = 0
    num_same: int = 0
    seconds: dict[str, list[float]] = field(default_factory=dict)


def inner_query(number: int, count: int, temperature: float, max_tokens: int) -> Generate:
    """`count` candidates of a round's own prompt, which asks for more text than `max_tokens` hold."""
    place = _PLACES[number % len(_PLACES)]
    asked = f"Write the first page of a story about {place}, chapter {number + 1}."
    messages = seq(system("You are a writer."), user(asked))
    return generate(messages, n=count, temperature=temperature, max_tokens=max_tokens)


def outer_head(one: Contestant, temperature: float, *place: int) -> str:
    """What an outer prompt begins with, new to the engine that it runs on. `place` is its number, fan-out, round, seed.

    Heads of one place are of equal length. What changes most often stands first, inside the first block.
    """
    return f"Case {_LETTERS[one]}{temperature:g}-{'-'.join(map(str, place))}."


def outer_prompt(
    template: ChatTemplate, inner: Generate, candidates: Sequence[Generated], head: str, rung: Rung | None = None
) -> SpanPrompt:
    """The judge's prompt over candidates of `inner`; `head` makes it new to any cache."""
    query = generate(
        seq(
            system(f"{head} You judge the beginnings of stories."),
            commute(replace(inner, n=len(candidates)), rung=rung),
            user("Which of the beginnings above is the best? Reply with its number only."),
        )
    )
    generated = {"$.query.operands[1].operands[0]": tuple(candidates)}
    return lower(query.query, template, generated=generated, rung=None, anchor=DEFAULT_ANCHOR).prompt


async def run_round(
    pair: Pair,
    number: int,
    temperature: float,
    records: dict[tuple[int, Contestant], Record],
    made: Candidates,
    *,
    fanouts: Sequence[int],
    who: Sequence[Contestant],
    num_outers: int,
    max_tokens: int,
    seed: int,
) -> None:
    """Generate candidates on both engines, and let outer prompts of each fan-out read them; then, at the largest
    fan-out, with full attention on our engine, and without the leases.

    Raises RuntimeError where an outer prompt's head was in the cache.
    """
    inner = inner_query(number, max(fanouts), temperature, max_tokens)
    ours, names = await _generate(pair, pair.ours, inner, seed, made, _LEASE)
    stock, _ = await _generate(pair, pair.stock, inner, seed, made, None)
    _note_candidates(made, ours, stock)
    for turn, fanout in enumerate(fanouts):
        answers: dict[Contestant, list[Answer]] = {one: [] for one in who if one not in LARGEST_ONLY}
        for outer in range(num_outers):
            heads = {one: outer_head(one, temperature, outer, fanout, number, seed) for one in answers}
            for one in list(answers) if (number + turn + outer) % 2 == 0 else list(answers)[::-1]:
                candidates = (stock if one is STOCK else ours)[:fanout]
                answers[one].append(await _ask_outer(pair, one, heads[one], inner, candidates))
            of_stock = plain(outer_prompt(pair.template, inner, stock[:fanout], heads[STOCK]))
            for one in answers:
                if one is STOCK:
                    continue
                exact, prompt = answers[STOCK][-1], plain(outer_prompt(pair.template, inner, ours[:fanout], heads[one]))
                if prompt != of_stock:
                    exact = await pair.ask(pair.stock, prompt, logprobs=TOP_TOKENS)
                _compare(records[fanout, one], answers[one][-1], exact)
        for one, found in answers.items():
            records[fanout, one].outers.append(found)
    for one in who:
        if one not in LARGEST_ONLY:
            continue
        if one is RELEASED:
            await pair.ours.release(names)
        head = outer_head(one, temperature, 0, max(fanouts), number, seed)
        records[max(fanouts), one].outers.append([await _ask_outer(pair, one, head, inner, ours)])


async def _ask_outer(
    pair: Pair, one: Contestant, head: str, inner: Generate, candidates: Sequence[Generated]
) -> Answer:
    """The answer to one outer prompt, of which no head was in the cache, and so nothing else but candidates."""
    prompt = outer_prompt(pair.template, inner, candidates, head, one.rung)
    engine = pair.stock if one is STOCK else pair.ours
    asked = plain(prompt) if one in (STOCK, FULL) else prompt
    answer = await pair.ask(engine, asked, logprobs=TOP_TOKENS)
    return check_found(answer, f"{one.name}, outer prompt {head!r}", num_shared=prompt.spans[0].start - 1)


async def _generate(
    pair: Pair, engine: Engine, inner: Generate, seed: int, made: Candidates, lease: Lease | None
) -> tuple[list[Generated], tuple[str, ...]]:
    """All candidates at once, and the names of their requests. Both engines sample with the same seeds.

    Without a lease and a temperature one answer stands for all: they are the same, and nothing of them is kept.
    """
    prompt = lower(inner.query, pair.template, generated={}, rung=None, anchor=DEFAULT_ANCHOR).prompt
    sampled = inner.sampling
    num_asked = inner.n if lease or sampled.temperature else 1
    begun = time.perf_counter()
    answers = await pair.ask_all(
        engine,
        [prompt] * num_asked,
        seeds=[seed * 1000 + place for place in range(num_asked)],
        max_tokens=sampled.max_tokens,
        temperature=sampled.temperature,
        lease=lease,
    )
    if num_asked == inner.n:
        made.seconds.setdefault("ours" if lease else "stock", []).append(time.perf_counter() - begun)
    candidates = [Generated(prompt, a.token_ids, a.text) for a in answers] * (inner.n // num_asked)
    return candidates, tuple(a.name for a in answers)


def _note_candidates(made: Candidates, ours: Sequence[Generated], stock: Sequence[Generated]) -> None:
    made.lengths += [len(candidate.token_ids) for candidate in ours]
    made.distinct.append(len({candidate.token_ids for candidate in ours}))
    made.num += len(ours)
    made.num_same += sum(a.token_ids == b.token_ids for a, b in zip(ours, stock, strict=True))


def _compare(record: Record, answer: Answer, exact: Answer) -> None:
    """How near an outer prompt's first token is to that of full attention over the same candidates."""
    mine, theirs = ({token: math.exp(value) for token, value in a.tops.items()} for a in (answer, exact))
    record.same.append(answer.token_ids[0] == exact.token_ids[0])
    record.distances.append(total_variation(mine, theirs))
    agreement = rank_agreement(answer.tops, exact.tops)
    if agreement is not None:
        record.agreements.append(agreement)
