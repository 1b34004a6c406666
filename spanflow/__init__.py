"""Span queries: say which parts of a prompt commute, and reuse their KV cache anywhere.

Importing this loads no model library and no engine; `Session` and the JSON form are looked up on first use.
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
from spanflow.ir.text import QuerySyntaxError, format_text, from_text, to_text
from spanflow.optimizer.lint import Finding, lint, lint_text

if TYPE_CHECKING:
    from spanflow.ir.json import from_json, from_spnl, json_schema, to_json, to_json_text, to_spnl
    from spanflow.session import Session

__all__ = [
    "EngineDied",
    "EngineUnavailable",
    "Finding",
    "GenerationFailed",
    "GenerationTimeout",
    "ModelError",
    "OptimizerError",
    "PromptTooLong",
    "QueryError",
    "QuerySyntaxError",
    "Rung",
    "Session",
    "SpanflowError",
    "SpansUnsupported",
    "assistant",
    "chat",
    "commute",
    "format_text",
    "fragment",
    "from_json",
    "from_spnl",
    "from_text",
    "generate",
    "json_schema",
    "lint",
    "lint_text",
    "repair",
    "retrieve",
    "seq",
    "system",
    "to_json",
    "to_json_text",
    "to_spnl",
    "to_text",
    "user",
]

#: Where the names are that load more than the standard library.
_LATE = {"Session": "spanflow.session"} | dict.fromkeys(
    ("from_json", "from_spnl", "json_schema", "to_json", "to_json_text", "to_spnl"), "spanflow.ir.json"
)


def __getattr__(name: str) -> Any:
    if name in _LATE:
        from importlib import import_module

        return getattr(import_module(_LATE[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("spanflow")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LATE, "__version__"])
