"""The errors a caller can meet; each is also the built-in kind it is closest to."""


class SpanflowError(Exception):
    """Base of every error that spanflow raises on purpose."""


class QueryError(SpanflowError, ValueError):
    """A query, an option or a payload that cannot mean anything; the message says where."""


class PromptTooLong(QueryError):
    """A prompt with its answer does not fit the model's window.

    Attributes: `num_tokens` (prompt), `max_tokens` (asked for), `max_model_len`.
    """

    def __init__(self, num_tokens: int, max_tokens: int, max_model_len: int, where: str = "$") -> None:
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        super().__init__(
            f"{where}: the prompt has {num_tokens} tokens and asks for {max_tokens} more; "
            f"the model's window is {max_model_len}. Shorten the prompt, lower max_tokens, "
            "or open the session with a larger max_model_len."
        )

    def __reduce__(self) -> tuple[type, tuple[int, int, int]]:
        return type(self), (self.num_tokens, self.max_tokens, self.max_model_len)


class ModelError(SpanflowError, RuntimeError):
    """A model that is unknown, incomplete or broken on disk."""


class SpansUnsupported(SpanflowError, RuntimeError):
    """Spans were required, and this model, layout or option cannot serve them exactly."""


class EngineUnavailable(SpanflowError, RuntimeError):
    """The engine asked for is not installed or does not start here."""


class EngineDied(SpanflowError, RuntimeError):
    """The engine stopped while requests were in flight."""
