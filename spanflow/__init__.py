"""Span queries: say which parts of a prompt commute, and reuse their KV cache anywhere.

Importing this loads no model library and no engine; `Session` is looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spanflow.api.combinators import assistant, chat, commute, fragment, generate, retrieve, seq, system, user
from spanflow.errors import (
    EngineDied,
    EngineUnavailable,
    GenerationFailed,
    GenerationTimeout,
    ModelError,
    OptimizerError,
    PromptTooLong,
    QueryError,
    SpanflowError,
    SpansUnsupported,
)
from spanflow.ir.fidelity import Rung, repair

if TYPE_CHECKING:
    from spanflow.session import Session

__all__ = [
    "EngineDied",
    "EngineUnavailable",
    "GenerationFailed",
    "GenerationTimeout",
    "ModelError",
    "OptimizerError",
    "PromptTooLong",
    "QueryError",
    "Rung",
    "Session",
    "SpanflowError",
    "SpansUnsupported",
    "assistant",
    "chat",
    "commute",
    "fragment",
    "generate",
    "repair",
    "retrieve",
    "seq",
    "system",
    "user",
]


def __getattr__(name: str) -> Any:
    if name == "Session":
        from spanflow.session import Session

        return Session
    if name == "__version__":
        from importlib.metadata import version

        return version("spanflow")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), "Session", "__version__"])
