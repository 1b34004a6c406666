"""The run of one plan: what is ready starts, answers go to their readers, failures go where the policy says."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from spanflow.engine.protocol import EngineRequest
from spanflow.errors import EngineDied, GenerationFailed, QueryError, SpansUnsupported
from spanflow.ir.nodes import Node, Seq
from spanflow.ir.walk import ROOT, children, with_children
from spanflow.lowering.lower import Generated, Lowered
from spanflow.plan.graph import Generation, Key, Plan
from spanflow.result import Delta, Done, Event, Failed, Failure, Finished, Result, Started, span_results
from spanflow.runner.ask import Answer, ask, kept_ids, request_for
from spanflow.runner.host import GRACE, Host
from spanflow.runner.options import RunOptions
from spanflow.runner.prefetch import prefetch

_FIRST_PAUSE = 0.1  # seconds before the first retry; doubled for each further one


def run_plan(plan: Plan, host: Host, options: RunOptions) -> AsyncGenerator[Event, None]:
    """Run a plan; events come as they happen, and `Done` comes last.

    Closing the generator, or cancelling the task that reads it, aborts what is in flight and gives up all leases.
    Raises what the first generation that may not fail raised, with `partial` set to what was done by then.
    """
    return _Run(plan, host, options).events()


class _Run:
    """One run of one plan."""

    def __init__(self, plan: Plan, host: Host, options: RunOptions) -> None:
        self._plan = plan
        self._host = host
        self._options = options
        self._name = host.new_run()
        self._begun = time.perf_counter()
        self._waits_for = {generation.key: plan.num_inner(generation.key) for generation in plan.order}
        self._generations = {generation.key: generation for generation in plan.order}
        self._queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._lowered: dict[str, Lowered] = {}
        self._answers: dict[Key, Generated] = {}
        self._results: dict[Key, Result] = {}
        self._failures: dict[Key, Exception] = {}
        self._is_stopping = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """See `run_plan`."""
        main = asyncio.create_task(self._run_all())
        main.add_done_callback(lambda _: self._queue.put_nowait(None))
        done = False
        try:
            while (event := await self._queue.get()) is not None:
                yield event
            await main
            result = self._result()
            done = True
            yield Done(result)
        except Exception as error:
            with suppress(AttributeError):  # an error of somebody else's may take no attributes
                error.partial = self._by_path(self._results.values())  # type: ignore[attr-defined]
            raise
        finally:
            main.cancel()
            await asyncio.wait([main])
            release = self._host.release(self._name)
            if release is not None and not done:
                await asyncio.wait([release], timeout=GRACE)

    async def _run_all(self) -> None:
        if self._options.on_error != "skip":  # what cannot be asked at all is found before anything is asked
            for generation in self._plan.order:
                if not self._waits_for[generation.key] and generation.index == 0:
                    self._request(generation, await self._lower(generation), "")
        ahead: asyncio.Task[None] | None = None
        try:
            async with asyncio.TaskGroup() as group:
                for generation in self._plan.order:
                    if not self._waits_for[generation.key]:
                        group.create_task(self._work(generation, group))
                waiting = [path for path, inner in self._plan.inner.items() if inner]
                if waiting:
                    ahead = asyncio.create_task(self._prefetch(waiting))
        except ExceptionGroup as failed:
            error = failed.exceptions[0]
        else:
            return
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
        raise error

    async def _prefetch(self, waiting: list[str]) -> None:
        await prefetch(self._plan, waiting, self._host, self._options, self._name, is_hint=True)

    async def _work(self, generation: Generation, group: asyncio.TaskGroup) -> None:
        """Get the answer of one generation, then start those that waited for it alone."""
        async with self._host.slots:
            try:
                await self._attempt_all(generation)
            except Exception as error:
                self._queue.put_nowait(Failed(*generation.key, error, is_retried=False))
                if self._options.on_error != "skip" or isinstance(error, EngineDied):
                    self._is_stopping = True
                    raise
                self._failures[generation.key] = error
        for consumer in generation.consumers:
            self._waits_for[consumer] -= 1
            if not self._waits_for[consumer] and not self._is_stopping:
                group.create_task(self._work(self._generations[consumer], group))

    async def _attempt_all(self, generation: Generation) -> None:
        num_retries = self._options.num_retries if self._options.on_error == "retry" else 0
        for attempt in range(num_retries + 1):
            try:
                await self._attempt(generation, attempt)
                return
            except (QueryError, EngineDied, SpansUnsupported):  # it would fail in the same way again
                raise
            except Exception as error:
                if attempt == num_retries:
                    raise
                self._queue.put_nowait(Failed(*generation.key, error, is_retried=True))
                await asyncio.sleep(_FIRST_PAUSE * 2**attempt)

    async def _attempt(self, generation: Generation, attempt: int) -> None:
        path, index = generation.key
        lowered = await self._lower(generation)
        name = f"{self._name}/{path}#{index}" + (f"/again-{attempt}" if attempt else "")
        request = self._request(generation, lowered, name)
        if request.lease is not None:
            self._host.leases.hold(self._name, request.prompt, name)
        self._queue.put_nowait(Started(path, index, len(request.prompt)))
        where = path if generation.node.n == 1 else f"{path}, sample {index}"
        answer = await ask(
            self._host.engine.stream,
            request,
            where=where,
            within=self._options.timeout,
            on_text=lambda text: self._queue.put_nowait(Delta(path, index, text)),
        )
        result = self._result_of(generation, lowered, answer)
        if self._host.require_spans:
            _refuse_exact(result, where)
        self._results[generation.key] = result
        if generation.consumers:
            self._answers[generation.key] = self._generated(generation, lowered, answer)
        self._queue.put_nowait(Finished(path, index, result))

    def _request(self, generation: Generation, lowered: Lowered, name: str) -> EngineRequest:
        window = self._host.engine.info.max_model_len
        return request_for(generation, lowered, self._options, name=name, window=window)

    async def _lower(self, generation: Generation) -> Lowered:
        """The prompt of a generation, the same for all samples. Raises QueryError, GenerationFailed."""
        path = generation.path
        if path not in self._lowered:
            query, generated = self._inputs(generation)
            self._lowered[path] = await self._host.lower(query, generated, path, self._options)
        return self._lowered[path]

    def _inputs(self, generation: Generation) -> tuple[Node, Mapping[str, tuple[Generated, ...]]]:
        """What a generation reads: its query without the candidates that failed, and the answers to the others."""
        path, query = generation.path, generation.node.query
        generated: dict[str, tuple[Generated, ...]] = {}
        lost: defaultdict[str, set[Key]] = defaultdict(set)
        dropped: list[str] = []
        for inner in self._plan.inner[path]:
            samples = self._plan.samples(inner)
            generated[inner] = tuple(self._answers[s.key] for s in samples if s.key in self._answers)
            for sample in samples:
                error = self._failures.get(sample.key)
                if error is None:
                    continue
                place = sample.candidate
                if place is None:
                    raise GenerationFailed(f"{path}: it needs the answer of {inner}, which failed: {error}") from error
                if place.operand == inner:
                    lost[place.group].add(sample.key)
                else:
                    lost[place.group].add((place.operand, 0))
                    if not any(f"{place.operand}.".startswith(f"{operand}.") for operand in dropped):
                        query = _without(query, f"{path}.query", place.operand)
                        dropped.append(place.operand)
                if len(lost[place.group]) == place.num_operands:
                    raise GenerationFailed(
                        f"{path}: all {place.num_operands} candidates of the commute at {place.group} failed, "
                        f"the last one with: {error}"
                    ) from error
        return query, generated

    def _generated(self, generation: Generation, lowered: Lowered, answer: Answer) -> Generated:
        token_ids = answer.token_ids
        if generation.node.sampling.stop and answer.finish_reason == "stop":
            decode = partial(self._host.engine.tokenizer.decode, skip_special_tokens=True)
            token_ids = kept_ids(decode, token_ids, answer.text)
        return Generated(lowered.prompt, token_ids, answer.text, generation.is_leased)

    def _result_of(self, generation: Generation, lowered: Lowered, answer: Answer) -> Result:
        return Result(
            text=answer.text,
            token_ids=answer.token_ids,
            finish_reason=answer.finish_reason,
            usage=answer.usage,
            ttft=answer.first - answer.begun,
            total_seconds=answer.ended - answer.begun,
            elapsed=answer.ended - self._begun,
            spans=span_results(lowered, answer.spans, self._host.engine.info.spans_unsupported),
            path=generation.path,
            sample=generation.index,
            seed=generation.seed,
            num_tokens_differing=lowered.num_tokens_differing,
            notes=lowered.notes,
        )

    def _result(self) -> Result:
        """The result of the query. Raises what its last sample raised where none of them has one."""
        root = self._plan.samples(ROOT)
        found = [self._results[sample.key] for sample in root if sample.key in self._results]
        if not found:
            raise self._failures[root[-1].key]
        inner = [result for key, result in self._results.items() if key[0] != ROOT]
        failed = [key for key in self._generations if key in self._failures]
        failures = tuple(Failure(*key, self._failures[key]) for key in failed)
        return replace(found[0], others=tuple(found[1:]), inner=self._by_path(inner), failures=failures)

    def _by_path(self, results: Iterable[Result]) -> Mapping[str, tuple[Result, ...]]:
        by_key = {(result.path, result.sample): result for result in results}
        paths: dict[str, list[Result]] = {}
        for generation in self._plan.order:
            if generation.key in by_key:
                paths.setdefault(generation.path, []).append(by_key[generation.key])
        return {path: tuple(found) for path, found in paths.items()}


def _refuse_exact(result: Result, where: str) -> None:
    """Raises SpansUnsupported where spans ran with full attention, as only the engine's report says."""
    exact = [span for span in result.spans if span.status == "unsupported"]
    if exact:
        raise SpansUnsupported(
            f"{where}: {len(exact)} of {len(result.spans)} spans ran with full attention: {exact[0].why}. Give the KV "
            "cache more room or shorten the prompt, or open the session without require_spans"
        )


def _without(query: Node, path: str, operand: str) -> Node:
    """The query that stands at `path`, with nothing in the place of one operand below it."""
    steps = [int(step or 0) for step in re.findall(r"\.\w+(?:\[(\d+)\])?", operand.removeprefix(path))]
    above = [query]
    for step in steps[:-1]:
        above.append(children(above[-1])[step])
    node: Node = Seq(())
    for parent, step in zip(reversed(above), reversed(steps), strict=True):
        below = list(children(parent))
        below[step] = node
        node = with_children(parent, below)
    return node
