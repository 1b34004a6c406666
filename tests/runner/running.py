"""Runs of queries on a scripted engine, for the tests of the runner."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from scripted_engine import Script, ScriptedEngine

from spanflow import commute, generate, seq, user
from spanflow.compile import as_generate, compile_query
from spanflow.engine.protocol import EngineRequest
from spanflow.ir.nodes import Generate, Node
from spanflow.lowering.template import ChatTemplate
from spanflow.result import Done, Event, Result
from spanflow.runner import Host, RunOptions, run_plan

TOKENIZER = Script().tokenizer


def host_of(script: Script, max_concurrency: int = 64, require_spans: bool = False) -> Host:
    engine = ScriptedEngine("m", script)
    template = ChatTemplate(engine.tokenizer)
    return Host(engine, template, model="m", max_concurrency=max_concurrency, require_spans=require_spans)


async def events_of(query: Node, script: Script, host: Host | None = None, **options: Any) -> list[Event]:
    chosen = RunOptions().changed(options)
    plan = compile_query(as_generate(query), chosen, model="m").plan
    async with aclosing(run_plan(plan, host or host_of(script), chosen)) as events:
        return [event async for event in events]


async def result_of(query: Node, script: Script, host: Host | None = None, **options: Any) -> Result:
    *_, last = await events_of(query, script, host, **options)
    assert isinstance(last, Done)
    return last.result


def candidates(number: int, **options: Any) -> list[Generate]:
    return [generate(user(f"write {i}"), **options) for i in range(number)]


def judge(*operands: Node, **options: Any) -> Generate:
    return generate(seq(commute(*operands), user("which?")), **options)


def asks(text: str) -> Callable[[EngineRequest], bool]:
    """Whether a request's prompt, without what it takes over from inner answers, contains a text."""
    return lambda request: text in script_text(request)


def script_text(request: EngineRequest) -> str:
    return TOKENIZER.decode(request.prompt.token_ids)


def script(**options: Any) -> Script:
    return Script(tokenizer=TOKENIZER, **options)


def failing(text: str, error: Exception | None = None, times: int = 1000) -> Callable[[EngineRequest], str | Exception]:
    left = [times]

    def answer(request: EngineRequest) -> str | Exception:
        if script_text(request).endswith(f"user\n{text}<|im_end|>\n<|im_start|>assistant\n") and left[0]:
            left[0] -= 1
            return error or RuntimeError(f"no {text}")
        return " fine"

    return answer
