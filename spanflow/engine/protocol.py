"""What every engine offers, and the plain data that goes in and comes out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import SpanPrompt

SpanStatus = Literal["hit", "new", "evicted", "unsupported", "computed"]
FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Lease:
    """Keep the KV of a generation until `consumers` outer prompts have taken it over, or `seconds` have passed."""

    consumers: int = 1
    seconds: float = 600.0


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt for one answer. `sampling.max_tokens` is set; `salt` separates tenants.

    `logprobs`: number of top log-probabilities wanted per sampled token (tests and checks).
    """

    request_id: str
    prompt: SpanPrompt
    sampling: Sampling
    lease: Lease | None = None
    salt: str | None = None
    adapter: str | None = None
    priority: int = 0
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class SpanReport:
    """What became of one span. Token counts add up: moved + repaired + computed == len(span).

    `status`: hit (its KV was found), new or evicted (computed for this request first), unsupported
    (computed in context), computed (the same, as its rung says: it repairs so many tokens that none
    is left to move). `why` says more where there is more to say. `computed` counts tokens of the span
    computed in context other than for repair (the last sampled token of a candidate, or all of them
    where the span is unsupported).
    """

    start: int
    end: int
    status: SpanStatus
    moved: int = 0
    repaired: int = 0
    computed: int = 0
    why: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request: prompt and completion; `cached` of the prompt came from KV (prefix hits and moves),
    `internal` were computed for it by materialising missing spans."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    internal: int = 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a request would find if it ran now, before all others: one report a span, and tokens of its prompt.

    `computed` in its own pass, `cached` from KV (prefix hits and moves; they add up to the prompt), and `internal`
    beside it, to materialise spans that are missing. What making them would push out of a full cache is not foreseen.
    """

    spans: tuple[SpanReport, ...]
    computed: int
    cached: int
    internal: int


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """A piece of an answer: new text and token ids since the last piece; the last one carries the rest.

    `logprobs`, where asked for: per new token, a mapping of token id to log-probability.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, float], ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    spans: tuple[SpanReport, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a started engine is: the model, its window, and whether spans are served, or why not.

    `dtype` names the type of the numbers that it computes with, where it computes.
    """

    name: str
    model: str
    max_model_len: int
    block_size: int
    spans_unsupported: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""


class Engine(Protocol):
    """A started engine. Methods may be called from any task of the event loop that it was started on.

    `stream` yields pieces until one has a finish reason; leaving it early aborts the request.
    Raises QueryError for a request that cannot be served, EngineDied when the engine stopped.
    """

    info: EngineInfo

    @property
    def tokenizer(self) -> Any:
        """The Hugging Face tokenizer of the model."""

    def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Run one request."""

    async def predict(self, request: EngineRequest) -> Prediction | None:
        """What a request would find; changes nothing. None where the engine cannot tell. Raises as `stream` does."""

    async def prefetch(self, request: EngineRequest) -> bool:
        """Compute the KV of a prompt, whole, since spans will be taken from it: anchor and span, one after the other.

        What it samples is thrown away. False where no reader will find it: the prompt is as long as the window, or what
        it is made of does not fit beside it, or the engine keeps no KV between requests. Raises QueryError, EngineDied.
        """

    async def release(self, request_ids: tuple[str, ...]) -> None:
        """Give up the leases of these finished requests; unknown ids are ignored."""

    async def audit(self) -> Mapping[str, Any]:
        """Counts for tests and doctor: pins, leases, blocks in use, and `problems`, a list that must be empty."""

    async def reset(self) -> None:
        """Forget all cached KV (leases too)."""

    async def close(self) -> None:
        """Stop; idempotent."""
