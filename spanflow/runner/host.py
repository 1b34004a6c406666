"""What all runs on one engine share: the engine, places in flight, and leases."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field

from spanflow.engine.protocol import Engine
from spanflow.errors import SpanflowError
from spanflow.ir.nodes import Node
from spanflow.lowering.lower import Generated, Lowered, lower
from spanflow.lowering.prompt import SpanPrompt
from spanflow.lowering.template import ChatTemplate
from spanflow.runner.options import RunOptions

#: Seconds that an engine gets to take note of something when nobody waits for the answer any more.
GRACE = 5.0


@dataclass(slots=True)
class _Holders:
    runs: set[str] = field(default_factory=set)
    request_ids: list[str] = field(default_factory=list)


class Leases:
    """Which runs hold leases, by inner prompt.

    An engine may know a lease by its prompt alone, so leases of equal prompts are given up together, by the last run
    that holds one.
    """

    def __init__(self) -> None:
        self._by_prompt: dict[bytes, _Holders] = {}

    def hold(self, run: str, prompt: SpanPrompt, request_id: str) -> None:
        """Note that a run has asked for a lease of this prompt's KV."""
        holders = self._by_prompt.setdefault(prompt.digest, _Holders())
        holders.runs.add(run)
        holders.request_ids.append(request_id)

    def leave(self, run: str) -> tuple[str, ...]:
        """A run has ended: the requests whose leases nobody needs any more."""
        over: list[str] = []
        for digest, holders in list(self._by_prompt.items()):
            holders.runs.discard(run)
            if not holders.runs:
                over += holders.request_ids
                del self._by_prompt[digest]
        return tuple(over)


class Host:
    """A started engine with what its runs share; belongs to the event loop that the engine was started on.

    `model` is the name that the engine was started by; in a plan, a generate that names a model means an adapter. Where
    `require_spans` is set, a generation fails whose spans ran with full attention.
    """

    def __init__(
        self, engine: Engine, template: ChatTemplate, *, model: str, max_concurrency: int, require_spans: bool = False
    ) -> None:
        self.engine = engine
        self.model = model
        self.require_spans = require_spans
        self.template = template
        self.slots = asyncio.Semaphore(max_concurrency)
        self.leases = Leases()
        self._lowering = asyncio.Lock()
        self._run_names = (f"run-{number}" for number in itertools.count(1))
        self._chores: set[asyncio.Future[None]] = set()

    def new_run(self) -> str:
        """A name that no other run on this engine has."""
        return next(self._run_names)

    async def lower(
        self, query: Node, generated: Mapping[str, tuple[Generated, ...]], path: str, options: RunOptions
    ) -> Lowered:
        """Lower the query of the generate at `path`, beside the event loop. Raises QueryError."""
        async with self._lowering:  # one at a time: not every tokenizer is safe to use from several threads
            return await asyncio.to_thread(
                lower,
                query,
                self.template,
                generated=generated,
                rung=options.rung,
                anchor=options.anchor,
                path=f"{path}.query",
            )

    def release(self, run: str) -> asyncio.Future[None] | None:
        """Begin to give up what leases a run alone still has; None where there are none."""
        request_ids = self.leases.leave(run)
        if not request_ids:
            return None
        chore = asyncio.ensure_future(_within_grace(self.engine.release(request_ids)))
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)
        return chore

    async def settle(self) -> None:
        """Wait for what has been begun on behalf of runs that are over."""
        while self._chores:
            await asyncio.wait(self._chores)


async def _within_grace(work: Awaitable[None]) -> None:
    # A lease that cannot be given up ends by its time limit; an engine that died holds none.
    with contextlib.suppress(SpanflowError, TimeoutError):
        async with asyncio.timeout(GRACE):
            await work
