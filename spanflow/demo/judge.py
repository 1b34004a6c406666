"""The judge demo: candidates at a temperature, and one prompt that takes their KV over to pick one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from spanflow.api.combinators import commute, generate, seq, system, user
from spanflow.ir.nodes import Generate
from spanflow.ir.ranges import check_count
from spanflow.result import Result
from spanflow.session import Session

#: How often both ways are run, each time with candidates of their own.
NUM_REPEATS = 3
MAX_TOKENS = 48
#: How many candidates there may be: one leaves nothing to choose, and beyond 24 nothing was measured.
MIN_CANDIDATES, MAX_CANDIDATES = 2, 24

_TASK = "Write one sentence that makes people want to visit an old lighthouse by the sea."


@dataclass(frozen=True, slots=True)
class Judged:
    """One run of the judge. Seconds: `ttft` of the judge's prompt, `elapsed` of everything.

    `computed` are the tokens of the judge's prompt that were not taken from anywhere, `internal` those computed
    beside it. `num_spans` counts the candidates of which something is moved; one that is repaired whole can't be a hit.
    """

    candidates: tuple[str, ...]
    pick: str
    seed: int
    ttft: float
    elapsed: float
    num_tokens: int
    num_spans: int
    num_hit: int
    moved: int
    computed: int
    internal: int


@dataclass(frozen=True, slots=True)
class JudgeReport:
    """All runs, with what they were run with: `spans` with KV taken over, `stock` with full attention."""

    spans: tuple[Judged, ...]
    stock: tuple[Judged, ...]
    num_candidates: int
    temperature: float
    engine: str
    model: str
    spans_unsupported: str
    versions: dict[str, str]

    @property
    def ttft(self) -> float:
        """The median time to the first token of the judge, in seconds."""
        return median(judged.ttft for judged in self.spans)

    @property
    def stock_ttft(self) -> float:
        """The same with full attention."""
        return median(judged.ttft for judged in self.stock)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"summary": {"ttft": self.ttft, "stock_ttft": self.stock_ttft}}


def judge_query(num_candidates: int, temperature: float) -> Generate:
    """Candidates of one prompt, and the judge that reads them all."""
    candidates = generate(user(_TASK), n=num_candidates, temperature=temperature, max_tokens=MAX_TOKENS)
    return generate(
        seq(
            system("You compare sentences and choose the best one."),
            commute(candidates),
            user("Which of the sentences above is the best? Repeat it word for word."),
        ),
        max_tokens=MAX_TOKENS,
    )


def run_judge(
    session: Session,
    *,
    num_candidates: int = 8,
    temperature: float = 0.8,
    seed: int = 0,
    on_run: Callable[[str, Judged], None] = lambda way, judged: None,
) -> JudgeReport:
    """Run the judge several times with spans and with full attention, which of them first alternates.

    Both ways draw with the same seeds, so the candidates are the same; each repeat has its own. One run of each comes
    before, so that neither pays for the engine's first steps. Raises QueryError for numbers, and what a session raises.
    """
    check_count(num_candidates, "num_candidates", MIN_CANDIDATES, MAX_CANDIDATES)
    query = judge_query(num_candidates, temperature)
    ways: tuple[tuple[str, str | None], ...] = (("spans", None), ("stock", "exact"))
    for _, rung in ways:
        session.run(query, rung=rung, seed=seed)
    found: dict[str, list[Judged]] = {"spans": [], "stock": []}
    for repeat in range(1, NUM_REPEATS + 1):
        for way, rung in ways if repeat % 2 else ways[::-1]:
            judged = _judged(session.run(query, rung=rung, seed=seed + repeat), seed + repeat)
            found[way].append(judged)
            on_run(way, judged)
    info = session.info
    return JudgeReport(
        tuple(found["spans"]),
        tuple(found["stock"]),
        num_candidates,
        temperature,
        info.name,
        info.model,
        info.spans_unsupported,
        dict(info.versions),
    )


def _judged(result: Result, seed: int) -> Judged:
    usage, spans = result.usage, result.spans
    wanted = [span.status for span in spans if span.status != "computed"]
    (candidates,) = result.inner.values()
    return Judged(
        candidates=tuple(candidate.text.strip() for candidate in candidates),
        pick=result.text.strip(),
        seed=seed,
        ttft=result.ttft,
        elapsed=result.elapsed,
        num_tokens=usage.prompt,
        num_spans=len(wanted),
        num_hit=wanted.count("hit"),
        moved=sum(span.moved for span in spans),
        computed=usage.prompt - usage.cached,
        internal=usage.internal,
    )
