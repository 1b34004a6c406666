"""The doctor: what it compares, and when it says that something is wrong."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable

import pytest
from scripted_engine import Script, ScriptedEngine, register

from spanflow import EngineUnavailable, Session
from spanflow.doctor import Diagnosis, diagnose, installed
from spanflow.engine.protocol import EngineOutput, EngineRequest, SpanReport


class Measured(ScriptedEngine):
    """A scripted engine with log-probabilities: those of the n-th request, by the test."""

    logprob: Callable[[int, EngineRequest], float] = staticmethod(lambda number, request: -1.0)
    status = "hit"

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.script.submitted.append(request)
        logprob = type(self).logprob(len(self.script.submitted), request)
        reports = tuple(
            SpanReport(s.start, s.end, self.status, moved=max(0, len(s) - s.repair)) for s in request.prompt.spans
        )
        yield EngineOutput(" so", (5,), ({5: logprob, 6: -3.0},), "stop", spans=reports)


@pytest.fixture(autouse=True)
def _scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)
    monkeypatch.setattr("scripted_engine.ScriptedEngine", Measured)


def checked(script: Script) -> Diagnosis:
    with Session("m", engine="scripted", script=script) as session:
        return diagnose(session)


def failed(diagnosis: Diagnosis) -> list[str]:
    return [check.name for check in diagnosis.checks if check.is_ok is False]


def test_an_engine_that_is_right_is_well() -> None:
    script = Script()
    diagnosis = checked(script)
    assert diagnosis.is_well
    assert json.loads(json.dumps(diagnosis.to_dict()))["engine"]["name"] == "scripted"
    assert str(diagnosis).endswith("all is well")
    full, _, cold, warm, other, back, repaired = (request.prompt for request in script.submitted)
    assert full.spans == ()
    assert cold == warm == back
    assert {other.tokens(span) for span in other.spans} == {cold.tokens(span) for span in cold.spans}
    assert other.token_ids != cold.token_ids
    assert all(span.repair == len(span) for span in repaired.spans)
    assert repaired.token_ids == full.token_ids


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (4, "spans that are new against the same ones found again"),
        (6, "the same order before and after another one"),
        (7, "every token repaired against full attention"),
    ],
)
def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch, wrong: int, name: str) -> None:
    monkeypatch.setattr(Measured, "logprob", staticmethod(lambda number, request: -1.01 if number == wrong else -1.0))
    diagnosis = checked(Script())
    assert failed(diagnosis) == [name]
    assert "differ by 1.0e-02 (limit 1e-03)" in str(diagnosis)
    assert str(diagnosis).endswith("something is wrong: see above")


def test_rounding_of_the_engine_itself_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "logprob", staticmethod(lambda number, request: -1.0 - 0.01 * (number % 2)))
    assert checked(Script()).is_well


def test_spans_that_are_not_found_again_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "status", "new")
    assert failed(checked(Script())) == ["moved spans"]


def test_problems_of_bookkeeping_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def audit(self: ScriptedEngine) -> dict[str, object]:
        return {"problems": ["block 7 has 2 references too many"]}

    monkeypatch.setattr(ScriptedEngine, "audit", audit)
    diagnosis = checked(Script())
    assert failed(diagnosis) == ["bookkeeping"]
    assert "block 7 has 2 references too many" in str(diagnosis)


def test_a_model_without_spans_is_well_and_says_why() -> None:
    diagnosis = checked(Script(unsupported="its layers are of different types"))
    assert diagnosis.is_well
    assert "skipped  spans: its layers are of different types" in str(diagnosis)


def test_an_engine_without_log_probabilities_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "stream", ScriptedEngine.stream)
    diagnosis = checked(Script())
    assert diagnosis.is_well
    assert "skipped  moved spans: the engine gives no log-probabilities to compare" in str(diagnosis)


def test_an_engine_that_does_not_start_is_a_failed_check() -> None:
    session = Session("m", engine="scripted", script=Script(start_error=EngineUnavailable("not installed")))
    diagnosis = diagnose(session)
    session.close()
    assert diagnosis.engine is None
    assert failed(diagnosis) == ["engine"]


def test_versions_name_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanflow.doctor.PACKAGES", ("spanflow", "no-such-package"))
    assert installed()["no-such-package"] == "not installed"
    assert installed()["spanflow"][0].isdigit()
