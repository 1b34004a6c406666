"""What commands print and how they end: one JSON document or text on stdout, all else on stderr, an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import typer

from spanflow.errors import EngineUnavailable, ModelError, QueryError, SpanflowError, SpansUnsupported

#: Exit codes, besides 0 and those of wrong usage (2).
FAILED = 1
REJECTED = 3
UNAVAILABLE = 4
INTERRUPTED = 130

#: Characters in a line of a table that goes to a file or a pipe, at least.
_WIDTH_OF_FILES = 120


class Output:
    """Where a command prints its results."""

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        self._stream = stream
        self.as_json = as_json

    def show(self, data: Any, text: str = "") -> None:
        """The result: `data` as JSON, or the text."""
        self.write((json.dumps(data, ensure_ascii=False, indent=2) if self.as_json else text) + "\n")

    def write(self, text: str) -> None:
        """Text as it is."""
        self._stream.write(text)
        self._stream.flush()

    def print(self, *renderables: Any) -> None:
        """Tables and other things of rich; nothing under JSON."""
        if not self.as_json:
            from rich.console import Console

            console = Console(file=self._stream)
            if not console.is_terminal:
                console.width = max(console.width, _WIDTH_OF_FILES)
            console.print(*renderables, sep="\n", highlight=False)


def say(text: str) -> None:
    """Progress, for people, on stderr."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


@contextmanager
def reporting(*, as_json: bool, debug: bool) -> Iterator[Output]:
    """Run a command: its result goes to stdout alone, and an error becomes one message and an exit code.

    Under JSON an error is a document too. Whatever else writes to stdout, also from processes that the command
    starts, is sent to stderr.
    """
    with _only_results(sys.stdout) as stream:
        output = Output(stream, as_json=as_json)
        try:
            yield output
        except KeyboardInterrupt:
            say("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except typer.Exit:
            raise
        except Exception as error:  # noqa: BLE001 - a command says what went wrong, whatever it is
            if debug:
                traceback.print_exc(file=sys.stderr)
            if as_json:
                output.show({"error": type(error).__name__, "message": str(error)})
            say(f"error: {_message(error)}")
            raise typer.Exit(_code(error)) from None


def _message(error: Exception) -> str:
    if isinstance(error, SpanflowError | OSError):
        return str(error)
    return f"{type(error).__name__}: {error} (--debug shows where)"


def _code(error: Exception) -> int:
    match error:
        case QueryError():
            return REJECTED
        case EngineUnavailable() | ModelError() | SpansUnsupported():
            return UNAVAILABLE
        case _:
            return FAILED


@contextmanager
def _only_results(stdout: TextIO) -> Iterator[TextIO]:
    """A stream to the real stdout, while file descriptor 1 leads to stderr."""
    number = None
    with suppress(OSError, ValueError, AttributeError):  # a stream in memory has no descriptor
        number = stdout.fileno()
    if number != 1:
        yield stdout
        return
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding=stdout.encoding or "utf-8", errors="replace") as stream:
            yield stream
    finally:
        stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
