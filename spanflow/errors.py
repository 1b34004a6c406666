"""The errors a caller can meet; each is also the built-in kind it is closest to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class SpanflowError(Exception):
    """Base of every error that spanflow raises on purpose.

    Where a run failed, `partial` has the results of the generations that were done, by their paths; where several
    queries ran together, `results` has one entry each, None where there is none.
    """

    partial: Mapping[str, tuple[Any, ...]] = MappingProxyType({})
    results: tuple[Any, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # An __init__ may take other things than a message, so a copy is made without it.
        return type(self).__new__, (type(self), *self.args), vars(self)


class QueryError(SpanflowError, ValueError):
    """A query, an option or a payload that cannot mean anything; the message says where."""


class PromptTooLong(QueryError):
    """A prompt with its answer does not fit the model's window.

    Attributes: `num_tokens` (prompt), `max_tokens` (asked for), `max_model_len`, and `where`: the path of its generate,
    or which request it is.
    """

    def __init__(self, num_tokens: int, max_tokens: int, max_model_len: int, where: str = "$") -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.where = where
        super().__init__(
            f"{where}: the prompt has {num_tokens} tokens and asks for {max_tokens} more; "
            f"the window is {max_model_len}. Shorten the prompt, lower max_tokens, or open the session with a larger "
            "window, as far as the model has one (max_model_len, and kv_cache_gib to hold it)."
        )


class ModelError(SpanflowError, RuntimeError):
    """A model that is unknown, incomplete or broken on disk."""


class SpansUnsupported(SpanflowError, RuntimeError):
    """Spans were required, and this model, layout or option cannot serve them exactly."""


class EngineUnavailable(SpanflowError, RuntimeError):
    """The engine asked for is not installed or does not start here."""


class EngineDied(SpanflowError, RuntimeError):
    """The engine stopped while requests were in flight."""


class GenerationFailed(SpanflowError, RuntimeError):
    """The engine gave no answer to one generation of a query; the message says which."""


class GenerationTimeout(SpanflowError, TimeoutError):
    """One generation took longer than it was given; the message says which."""


class OptimizerError(SpanflowError, RuntimeError):
    """A rule set that does not come to rest, or that broke a query; a fault of the rules, not of the query."""
