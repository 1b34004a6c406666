"""What a person who waits is told."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from spanflow.result import Event, Failed, Finished

_SECONDS_BETWEEN = 1.0


def speaker(progress: bool | Callable[[str], None] | None) -> Callable[[str], None]:
    """Where progress goes: to a function, to stderr, nowhere; None means to stderr where that is a terminal."""
    if callable(progress):
        return progress
    if progress is None:
        progress = sys.stderr is not None and sys.stderr.isatty()
    return _to_stderr if progress else _nowhere


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"spanflow: {text}\n")
    sys.stderr.flush()


def _nowhere(text: str) -> None:
    """Say nothing."""


class Telling:
    """Tells how many generations of a run are done, now and then, where there is more than one."""

    def __init__(self, say: Callable[[str], None], num_generations: int) -> None:
        self._say = say
        self._total = num_generations
        self._num_done = 0
        self._told = time.monotonic()

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if self._total == 1 or not isinstance(event, Finished | Failed):
            return
        if isinstance(event, Failed) and event.is_retried:
            return
        self._num_done += 1
        now = time.monotonic()
        if now - self._told >= _SECONDS_BETWEEN:
            self._told = now
            self._say(f"{self._num_done} of {self._total} generations done")
