"""The default configuration in its own process: interrupted in each phase, and with other numbers of tokens a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest
from phases import ADDRESS, EVENTS_IN_PHASES, PATIENCE, Budget
from span_cases import DISTURBANCES, RESET, check_budgets, disturbed_judge
from vllm_rig import Judge, Rig

from spanflow.engine.environment import environment_variable

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def rig(start_rig: Any, model_dir: Path) -> Iterator[Rig]:
    """All as by default, but that the scheduler halts when it is told to."""
    from spanflow.engine.vllm import arguments

    plain = arguments.span_arguments

    def halting(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return plain(*args, **kwargs) | {"scheduler_cls": "halting_scheduler.HaltingScheduler"}

    start_rig.stop()
    with (
        Listener(family="AF_UNIX") as listener,
        environment_variable(ADDRESS, str(listener.address)),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(arguments, "span_arguments", halting)
        rig = Rig(model_dir)
        try:
            with listener.accept() as rig.halts:
                yield rig
        finally:
            rig.close()


@pytest.mark.parametrize("case", [*DISTURBANCES, RESET])
def test_an_event_in_each_phase(rig: Rig, judge: Judge, case: Callable[[Rig, Judge], None]) -> None:
    case(rig, judge)


@pytest.mark.parametrize(("event", "phase"), EVENTS_IN_PHASES)
def test_an_event_in_each_phase_of_a_judge(rig: Rig, judge: Judge, event: str, phase: str) -> None:
    disturbed_judge(rig, judge, event, phase)


def test_budgets_that_cut_documents(rig: Rig, judge: Judge) -> None:
    def told(budget: int | None) -> int:
        """Set how many tokens a step may have. How many the largest step had since the last time."""
        rig.halts.send(Budget(budget))
        rig.audit()
        assert rig.halts.poll(PATIENCE)
        most: int = rig.halts.recv()
        return most

    check_budgets(rig, judge, told)
