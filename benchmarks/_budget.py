"""A bound on the time that a benchmark takes: a round begins only if it will probably end in time."""

from __future__ import annotations

import time
from collections.abc import Callable


class Budget:
    """`seconds` from now on (None: no bound), less `already` that have passed. `clock` gives seconds."""

    def __init__(
        self, seconds: float | None, already: float = 0.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        self._begun = clock() - already
        self._seconds = seconds
        self._costs: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._begun

    def allows(self, name: str) -> bool:
        """Whether there is time for another round of this name; the first one is always allowed."""
        if self._seconds is None or name not in self._costs:
            return True
        return self.elapsed + self._costs[name] <= self._seconds

    def note(self, name: str, begun: float) -> None:
        """A round of this name that was begun when `elapsed` was `begun` has ended now."""
        self._costs[name] = self.elapsed - begun
