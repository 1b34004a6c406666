"""What a run hands out: the result of each generation, and the events on the way there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeAlias

from spanflow.engine.protocol import FinishReason, SpanReport, SpanStatus, Usage
from spanflow.ir.fidelity import Rung
from spanflow.lowering.lower import Lowered


@dataclass(frozen=True, slots=True)
class SpanResult:
    """What became of one span `[start, end)` of a prompt.

    `path` is that of its operand in the tree. `status` is 'unreported' where the engine said nothing about it. Token
    counts add up to its length where it was reported: `moved`, `repaired`, `computed`. `why` says more.
    """

    path: str
    start: int
    end: int
    rung: Rung
    anchor: Literal["header", "head", "none", "prompt"]
    kind: Literal["text", "generated"]
    status: SpanStatus | Literal["unreported"]
    moved: int = 0
    repaired: int = 0
    computed: int = 0
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"rung": str(self.rung)}


@dataclass(frozen=True, slots=True)
class Failure:
    """A generation that was dropped from its commute, and why."""

    path: str
    sample: int
    error: Exception

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "path": self.path,
            "sample": self.sample,
            "error": type(self.error).__name__,
            "message": f"{self.error}",
        }


@dataclass(frozen=True, slots=True)
class Result:
    """One answer, and what it took.

    Seconds: `ttft` from the submission of this generation to its first token, `total_seconds` to its last,
    `elapsed` from the start of the whole run to its last. `seed` is None for a greedy answer.

    The result of a query also has `others`, its further samples, `inner`, the results of nested generations by path,
    and `failures`, the generations that were dropped. `notes` say what lowering wants the author to know, and
    `num_tokens_differing` how many tokens a tokenisation of the whole prompt in one go would change.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    ttft: float
    total_seconds: float
    elapsed: float
    spans: tuple[SpanResult, ...] = ()
    path: str = "$"
    sample: int = 0
    seed: int | None = None
    num_tokens_differing: int = 0
    notes: tuple[str, ...] = ()
    others: tuple[Result, ...] = ()
    inner: Mapping[str, tuple[Result, ...]] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()

    @property
    def samples(self) -> tuple[Result, ...]:
        """All answers to the query, this one first."""
        return self, *self.others

    @property
    def total_usage(self) -> Usage:
        """The tokens of the whole query: this answer, its other samples, and all nested generations."""
        everything = [*self.samples, *(result for results in self.inner.values() for result in results)]
        sums = {part.name: sum(getattr(result.usage, part.name) for result in everything) for part in fields(Usage)}
        return Usage(**sums)

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        plain = {part.name: getattr(self, part.name) for part in fields(self)}
        return plain | {
            "token_ids": list(self.token_ids),
            "usage": asdict(self.usage),
            "spans": [span.to_dict() for span in self.spans],
            "notes": list(self.notes),
            "others": [other.to_dict() for other in self.others],
            "inner": {path: [result.to_dict() for result in results] for path, results in self.inner.items()},
            "failures": [failure.to_dict() for failure in self.failures],
        }


def span_results(lowered: Lowered, reports: tuple[SpanReport, ...], unsupported: str) -> tuple[SpanResult, ...]:
    """Reports of an engine with where their spans come from; `unsupported` says why the engine serves none."""
    known = {(report.start, report.end): report for report in reports}
    results = []
    for span, source in zip(lowered.prompt.spans, lowered.sources, strict=True):
        report = known.get((span.start, span.end))
        place = (source.path, span.start, span.end, source.rung, source.anchor, source.kind)
        if report is not None:
            counts = (report.moved, report.repaired, report.computed)
            results.append(SpanResult(*place, report.status, *counts, report.why))
        elif unsupported:
            results.append(SpanResult(*place, "unsupported", 0, 0, len(span), unsupported))
        else:
            results.append(SpanResult(*place, "unreported", why="the engine's report did not arrive"))
    return tuple(results)


@dataclass(frozen=True, slots=True)
class Started:
    """A generation was handed to the engine; `num_tokens` is the length of its prompt."""

    path: str
    sample: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of an answer."""

    path: str
    sample: int
    text: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A generation has its answer."""

    path: str
    sample: int
    result: Result


@dataclass(frozen=True, slots=True)
class Failed:
    """A generation failed. Where it is tried again, what was streamed of it does not count."""

    path: str
    sample: int
    error: Exception
    is_retried: bool


@dataclass(frozen=True, slots=True)
class Done:
    """The whole query has its result; the last event."""

    result: Result


Event: TypeAlias = Started | Delta | Finished | Failed | Done
