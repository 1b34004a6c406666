"""The scheduler of an engine in a process of its own, which halts where a test asks for it.

The test listens at the address in the environment; what it sends is taken at the beginning of the next step.
"""

from __future__ import annotations

import os
from multiprocessing.connection import Client
from typing import Any

from phases import ADDRESS, PATIENCE, PHASES, Budget, Halt, preempt_all

from spanflow.engine.vllm.scheduler import SpanScheduler


class HaltingScheduler(SpanScheduler):
    """Halts after the step in which a phase is reached; what comes in meanwhile happens before the next step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.test = Client(os.environ[ADDRESS])
        self.own_budget = self.max_num_scheduled_tokens
        self.most_scheduled = 0
        self.wanted: Halt | None = None
        self.halted: Halt | None = None

    def add_request(self, *args: Any, **kwargs: Any) -> None:
        self._listen()
        super().add_request(*args, **kwargs)
        self._halt_if_reached()

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        self._listen()
        output = super().schedule(*args, **kwargs)
        self.most_scheduled = max(self.most_scheduled, output.total_num_scheduled_tokens)
        return output

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super().update_from_output(*args, **kwargs)
        self._halt_if_reached()
        return outputs

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        self._happens("abort")
        return super().finish_requests(*args, **kwargs)

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> Any:
        self._happens("reset")
        return super().reset_prefix_cache(*args, **kwargs)

    def _listen(self) -> None:
        while self.test.poll():
            match self.test.recv():
                case Halt(budget=budget) as halt:
                    self.wanted = halt
                    self.max_num_scheduled_tokens = budget
                case Budget(tokens):
                    self.max_num_scheduled_tokens = tokens or self.own_budget
                    self.test.send(self.most_scheduled)
                    self.most_scheduled = 0

    def _halt_if_reached(self) -> None:
        if self.wanted is None or not PHASES[self.wanted.phase](self):
            return
        self.halted, self.wanted = self.wanted, None
        self.test.send(self.halted)
        if not self.test.poll(PATIENCE):
            raise TimeoutError(f"the test left the engine halted: {self.halted}")
        self.test.recv()
        if self.halted.event == "preempt":
            self._happens("preempt")
            preempt_all(self)

    def _happens(self, event: str) -> None:
        """Tell the test whether the phase still lasts where the event takes place that the engine was halted for."""
        if self.halted is not None and self.halted.event == event:
            halt, self.halted = self.halted, None
            self.max_num_scheduled_tokens = self.own_budget
            self.test.send(PHASES[halt.phase](self))
