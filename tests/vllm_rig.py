"""A real engine on a loop of its own, prompts with spans of known text, and the oracle's word on each answer."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spanflow.engine.oracle_model import OracleModel
from spanflow.engine.protocol import EngineOutput, EngineRequest, Lease
from spanflow.engine.vllm.client import VllmEngine
from spanflow.ir.nodes import Sampling
from spanflow.lowering.prompt import Span, SpanPrompt

T = TypeVar("T")

#: Log-probabilities of the engine and of the oracle (float32, other kernels, other order of sums).
TOLERANCE = 1e-4

_NAMES = itertools.count()

TEXTS = (
    "The lighthouse of Varn stands on a black cliff and was lit for the first time in 1871 by Ida Holm. ",
    "Copper turns green in sea air because a thin layer of salts grows on it over some twenty years. ",
    "The river Osk freezes in November, and the ferry at Tarrin is replaced by a road of ice. ",
    "A violin by Bellini was found in a barn in 1934 under forty sacks of oats, its bridge still standing. ",
    "Honey never spoils while it is sealed; jars from old tombs have been opened and tasted. ",
    "The town clock of Merel has thirteen marks, since its maker was paid by the mark. ",
)


@dataclass
class Answer:
    """What came back for one prompt."""

    prompt: SpanPrompt
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[dict[int, float], ...]
    last: EngineOutput

    @classmethod
    def of(cls, prompt: SpanPrompt, pieces: Sequence[EngineOutput]) -> Answer:
        """What the pieces of a stream make up."""
        ids = tuple(token for piece in pieces for token in piece.token_ids)
        logprobs = tuple(dict(step) for piece in pieces for step in piece.logprobs)
        last = pieces[-1] if pieces else EngineOutput()
        return cls(prompt, ids, "".join(piece.text for piece in pieces), logprobs, last)

    @property
    def spans(self) -> Any:
        return self.last.spans

    @property
    def statuses(self) -> list[str]:
        return [span.status for span in self.last.spans]


@dataclass
class Rig:
    """A started engine and its oracle. All methods block; the engine runs on a thread's event loop."""

    model: Path
    options: dict[str, Any] = field(default_factory=dict)
    #: Where a scheduler that halts is told to, if the engine has one.
    halts: Any = None

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.num_audits = 0
        settings = {"max_model_len": 4608, "kv_cache_gib": 1.0, "audit_steps": True} | self.options
        self.engine = self.wait(VllmEngine.start(str(self.model), **settings), 180)
        self.tokenizer = self.engine.tokenizer
        self.header = tuple(self.encode("<|im_start|>user\n"))
        self.answer_header = tuple(self.encode("<|im_start|>assistant\n"))

    def wait(self, work: Awaitable[T], timeout: float = 60) -> T:
        async def run() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(run(), self.loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()  # Else it goes on beside the next test.
            raise

    def close(self) -> None:
        self.wait(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def document(self, number: int, times: int = 3) -> tuple[int, ...]:
        """A document of some twenty tokens, repeated `times` times."""
        return tuple(self.encode(f"Document {number * 37 % 101}. " + TEXTS[number % len(TEXTS)] * times))

    def prompt(
        self,
        documents: Sequence[Sequence[int]],
        question: str = "What is said here?",
        *,
        repair: int = 0,
        anchor: SpanPrompt | None = None,
        system: str = "Answer from the documents.",
        lead: Sequence[int] = (),
    ) -> SpanPrompt:
        """System message, documents as spans inside a user message, question behind them."""
        ids = [*self.encode(f"<|im_start|>system\n{system}<|im_end|>\n"), *lead, *self.header]
        spans = []
        for document in documents:
            behind = SpanPrompt(self.header) if anchor is None else anchor
            spans.append(Span(len(ids), len(ids) + len(document), behind, min(repair, len(document))))
            ids += document
        ids += self.encode(f"\n{question}<|im_end|>\n") + list(self.answer_header)
        return SpanPrompt(tuple(ids), tuple(spans))

    def chat(self, text: str) -> SpanPrompt:
        """An ordinary prompt of one user message."""
        ids = self.encode(f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{text}<|im_end|>\n")
        return SpanPrompt((*ids, *self.answer_header))

    def endless(self, number: int) -> SpanPrompt:
        """A prompt whose greedy answer goes on as long as it may, on any processor: it repeats what stands there."""
        return SpanPrompt(tuple(self.encode(f"Document {number}.\n" + f"{TEXTS[number % len(TEXTS)].strip()}\n" * 4)))

    def judge(
        self,
        inner: Sequence[Answer],
        question: str = "Which answer is the best?",
        repair: int = 0,
        system: str = "You are a judge.",
        head: Sequence[int] | None = None,
    ) -> SpanPrompt:
        """An outer prompt that takes the answers of `inner` over as spans, with the end of the prompt before each.

        They stand behind a system message or a given `head`.
        """
        ids = self.encode(f"<|im_start|>system\n{system}<|im_end|>\n") if head is None else list(head)
        spans = []
        width = len(self.answer_header)
        end_of_turn = self.encode("<|im_end|>")[0]
        for answer in inner:
            start = len(ids)
            ids += [*answer.prompt.token_ids[-width:], *answer.token_ids]
            anchor = SpanPrompt(answer.prompt.token_ids[:-width], answer.prompt.spans)
            spans.append(Span(start, len(ids), anchor, min(repair, len(ids) - start), width))
            ids += self.encode("\n") if answer.token_ids[-1] == end_of_turn else self.encode("<|im_end|>\n")
        ids += self.encode(f"<|im_start|>user\n{question}<|im_end|>\n") + list(self.answer_header)
        return SpanPrompt(tuple(ids), tuple(spans))

    async def run(self, prompt: SpanPrompt, max_tokens: int = 1, name: str = "", **options: Any) -> Answer:
        """One request to its end. `options` are fields of Sampling and of EngineRequest."""
        sampling = {k: options.pop(k) for k in ("temperature", "seed", "stop", "schema") if k in options}
        options.setdefault("logprobs", 10)
        request = EngineRequest(name or f"test-{next(_NAMES)}", prompt, Sampling(max_tokens, **sampling), **options)
        return Answer.of(prompt, [piece async for piece in self.engine.stream(request)])

    def ask(self, *prompts: SpanPrompt, max_tokens: int = 1, **options: Any) -> list[Answer]:
        """All prompts at once; the answers in order."""

        async def together() -> list[Answer]:
            return list(await asyncio.gather(*(self.run(p, max_tokens, **options) for p in prompts)))

        return self.wait(together())

    def one(self, prompt: SpanPrompt, max_tokens: int = 1, **options: Any) -> Answer:
        return self.ask(prompt, max_tokens=max_tokens, **options)[0]

    def prefetch(self, *sources: SpanPrompt) -> None:
        """Compute and keep the KV of each source, one after the other."""
        for source in sources:
            self.wait(self.engine.prefetch(EngineRequest(f"test-{next(_NAMES)}", source, Sampling(1))))

    def computed(self) -> int:
        """How many tokens were computed until now, but for the one that each audit takes."""
        number: int = self.audit()["scheduled_tokens"]
        return number - self.num_audits

    def reset(self) -> None:
        self.wait(self.engine.reset())

    def audit(self) -> dict[str, Any]:
        """The core's counts; nothing may be amiss, and nothing of ours may be left in an idle engine."""
        self.num_audits += 1
        counts = dict(self.wait(self.engine.audit()))
        assert counts["problems"] == []
        return counts

    def assert_idle(self) -> None:
        """No pin, no family, no held or internal request is left (the audit's own request aside)."""
        counts = self.audit()
        left = {name: counts[name] for name in ("internal", "held", "families", "pins") if counts[name]}
        assert not left, f"left in an idle engine: {left}"
        assert counts["requests"] == 1

    @property
    def scheduler(self) -> Any:
        """The core's scheduler; in-process engines only."""
        return self.engine._backend.engine.engine_core.engine_core.scheduler


class Judge:
    """The oracle, and how far an answer is from it."""

    def __init__(self, model: Path) -> None:
        self.oracle = OracleModel.load(model)

    def distance(self, answer: Answer, prompt: SpanPrompt | None = None) -> float:
        """The largest difference on the top log-probabilities of the first token."""
        return _farthest(answer.logprobs[0], self.oracle.prompt_logits(prompt or answer.prompt)[-1])

    def check(self, *answers: Answer, tolerance: float = TOLERANCE) -> None:
        """Each token of each answer, behind those that the engine said before it."""
        for answer in answers:
            said = SpanPrompt(answer.prompt.token_ids + answer.token_ids[:-1], answer.prompt.spans)
            expected = self.oracle.prompt_logits(said, last=len(answer.token_ids))
            for number, (found, wanted) in enumerate(zip(answer.logprobs, expected, strict=True)):
                assert len(found) >= 10
                assert _farthest(found, wanted) < tolerance, f"token {number}"


def _farthest(found: Mapping[int, float], wanted: Any) -> float:
    return max(abs(value - float(wanted[token])) for token, value in found.items())


def difference(one: Answer, other: Answer) -> float:
    """The largest difference of two answers on the top log-probabilities that both name, for all tokens."""
    assert one.token_ids == other.token_ids
    return max(
        abs(a[token] - b[token])
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
        for token in a.keys() & b.keys()
    )


def probability_difference(one: Answer, other: Answer) -> float:
    """The same as probabilities. KV that was decoded differs from KV that was prefilled in the last bits of float32,
    which log-probabilities of improbable tokens magnify."""
    assert one.token_ids == other.token_ids
    return max(
        abs(math.exp(a[token]) - math.exp(b[token]))
        for a, b in zip(one.logprobs, other.logprobs, strict=True)
        for token in a.keys() & b.keys()
    )


def generate_candidates(rig: Rig, count: int, max_tokens: int = 24, **options: Any) -> list[Answer]:
    """`count` answers to one prompt, each another sample, kept for an outer prompt."""
    prompt = options.pop("prompt", None) or rig.chat("Write one sentence about the sea.")
    lease = options.pop("lease", Lease())

    async def together() -> list[Answer]:
        work = (
            rig.run(prompt, max_tokens, temperature=0.9, seed=100 + number, lease=lease, **options)
            for number in range(count)
        )
        return list(await asyncio.gather(*work))

    return rig.wait(together())
