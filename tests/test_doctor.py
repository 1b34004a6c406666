"""The doctor: what it compares, and when it says that something is wrong."""

from __future__ import annotations

import json
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from scripted_engine import Script, ScriptedEngine, register

from spanflow import EngineUnavailable, ModelError, Session
from spanflow.doctor import COMPARABLE, Diagnosis, diagnose, installed
from spanflow.engine import registry
from spanflow.engine.protocol import EngineOutput, EngineRequest, SpanReport

ORACLE = "moved spans against the oracle"


class Measured(ScriptedEngine):
    """A scripted engine with log-probabilities: those of the n-th request, by the test."""

    logprob: Callable[[int, EngineRequest], float] = staticmethod(lambda number, request: -1.0)
    status = "hit"
    dtype = "float32"

    def __init__(self, model: str, script: Script) -> None:
        super().__init__(model, script)
        self.info = replace(self.info, dtype=self.dtype)

    @classmethod
    async def start(  # type: ignore[override]
        cls, model: str, *, script: Script, progress: Any = None, **options: Any
    ) -> ScriptedEngine:
        Oracle.alive_at_start = [ref() for ref in Oracle.started]
        return await super().start(model, script=script)

    async def stream(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        self.script.submitted.append(request)
        logprob = type(self).logprob(len(self.script.submitted), request)
        reports = tuple(
            SpanReport(s.start, s.end, self.status, moved=max(0, len(s) - s.repair)) for s in request.prompt.spans
        )
        yield EngineOutput(" so", (5,), ({5: logprob, 6: -3.0},), "stop", spans=reports)


class Oracle(Measured):
    """What the engine is compared with; its script is shared by all that are started in a test."""

    logprob = staticmethod(lambda number, request: -1.0)
    shared = Script()
    started: ClassVar[list[weakref.ref[ScriptedEngine]]] = []
    alive_at_start: ClassVar[list[object]] = []

    @classmethod
    async def start(cls, model: str, *, progress: Any = None) -> ScriptedEngine:  # type: ignore[override]
        progress("weights are on their way")
        engine = await ScriptedEngine.start.__func__(cls, model, script=cls.shared)  # type: ignore[attr-defined]
        engine.itself = engine  # as models do, it goes only where garbage is looked for
        cls.started.append(weakref.ref(engine))
        return engine


@pytest.fixture(autouse=True)
def oracle(monkeypatch: pytest.MonkeyPatch) -> Script:
    register(monkeypatch)
    known = {**registry.ENGINES, "oracle": registry.Factory("scripted_engine", "Oracle")}
    monkeypatch.setattr(registry, "ENGINES", known)
    monkeypatch.setattr("scripted_engine.ScriptedEngine", Measured)
    monkeypatch.setattr("scripted_engine.Oracle", Oracle, raising=False)
    monkeypatch.setattr(Oracle, "shared", Script())
    monkeypatch.setattr(Oracle, "started", [])
    monkeypatch.setattr("spanflow.doctor.COMPARABLE", COMPARABLE | {"script"})
    return Oracle.shared


def checked(script: Script, model: str = "m", **options: Any) -> Diagnosis:
    with closing(Session(model, engine="scripted", script=script, **options)) as session:
        return diagnose(session)


def failed(diagnosis: Diagnosis) -> list[str]:
    return [check.name for check in diagnosis.checks if check.is_ok is False]


def test_an_engine_that_is_right_is_well() -> None:
    script = Script()
    diagnosis = checked(script)
    assert diagnosis.is_well
    assert json.loads(json.dumps(diagnosis.to_dict()))["engine"]["name"] == "scripted"
    assert str(diagnosis).endswith("all is well")
    full, _, cold, warm, other, back, repaired, *_ = (request.prompt for request in script.submitted)
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
    monkeypatch.setattr(Measured, "dtype", "float16")
    monkeypatch.setattr(Measured, "logprob", staticmethod(lambda number, request: -1.0 - 0.01 * (number % 2)))
    assert checked(Script()).is_well


def test_spans_that_are_not_found_again_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "status", "new")
    assert failed(checked(Script())) == ["moved spans", "spans moved to be compared"]


def test_what_is_moved_is_compared_with_the_oracles_word(oracle: Script) -> None:
    script = Script()
    diagnosis = checked(script)
    before, moved, full = (request.prompt for request in script.submitted[-3:])
    assert [request.prompt for request in oracle.submitted] == [moved, full]
    assert full.token_ids == moved.token_ids
    assert full.spans == ()
    assert [moved.tokens(span) for span in moved.spans] == [before.tokens(span) for span in before.spans[::-1]]
    assert len(moved.spans) == 2
    assert all(span.repair == 0 and span.anchor == before.spans[0].anchor for span in moved.spans)
    found = {check["name"]: check for check in json.loads(json.dumps(diagnosis.to_dict()))["checks"]}
    assert (found[ORACLE]["difference"], found[ORACLE]["limit"]) == (0.0, 1e-3)
    assert "(limit 1e-03 in float32)" in found[ORACLE]["detail"]
    assert found["spans moved to be compared"]["is_ok"]


def test_no_span_is_moved_by_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tokens are: with blocks as long as the first way that comes to mind, another one is found."""

    def ways() -> list[int]:
        script = Script()
        assert checked(script).is_well
        return [span.start - len(span.anchor) for span in script.submitted[-2].prompt.spans]

    before = ways()
    assert all(way % 16 for way in before)
    monkeypatch.setattr("spanflow.doctor._BLOCK", before[-1])
    assert len(before) == len(ways()) == 2
    assert all(way % before[-1] for way in ways())


def test_the_oracle_is_gone_before_the_engine_starts(oracle: Script) -> None:
    assert checked(Script()).is_well
    assert (oracle.num_starts, oracle.num_closes) == (1, 1)
    assert Oracle.alive_at_start == [None]


@pytest.mark.parametrize(
    ("dtype", "difference", "finds"),
    [
        ("float32", 9e-4, []),
        ("float32", 1.1e-3, [ORACLE]),
        ("float16", 0.09, []),
        ("float16", 0.11, [ORACLE]),
        ("bfloat16", 0.49, []),
        ("bfloat16", 0.51, [ORACLE]),
        ("float32", float("nan"), [ORACLE]),
        ("float32", float("inf"), [ORACLE]),
    ],
)
def test_a_wrong_move_is_found_by_the_bound_of_its_type(
    monkeypatch: pytest.MonkeyPatch, dtype: str, difference: float, finds: list[str]
) -> None:
    monkeypatch.setattr(Measured, "dtype", dtype)
    logprobs = {9: -1.0 - difference}  # in all other requests the engine agrees with itself
    monkeypatch.setattr(Measured, "logprob", staticmethod(lambda number, request: logprobs.get(number, -1.0)))
    diagnosis = checked(Script())
    assert failed(diagnosis) == finds
    assert diagnosis.is_well is (not finds)
    json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))


def test_a_difference_without_moves_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "logprob", staticmethod(lambda number, request: -1.0 - 0.01 * (number == 10)))
    assert failed(checked(Script())) == ["full attention against the oracle"]


@pytest.mark.parametrize(
    ("oracles", "why"),
    [
        (Script(start_error=ModelError("no such model")), "the oracle can't run here: ModelError: no such model"),
        (Script(start_error=MemoryError("too much")), "the oracle can't run here: MemoryError: too much"),
        (Script(unsupported="it slides"), "the oracle serves no spans on this model: it slides"),
    ],
)
def test_where_the_oracle_cannot_answer_it_says_so(monkeypatch: pytest.MonkeyPatch, oracles: Script, why: str) -> None:
    monkeypatch.setattr(Oracle, "shared", oracles)
    diagnosis = checked(Script())
    assert diagnosis.is_well
    assert f"skipped  {ORACLE}: {why}" in str(diagnosis)
    assert [check.is_ok for check in diagnosis.checks if check.name == ORACLE] == [None]


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"revision": "r1"}, "revision"),
        ({"quantization": "fp8", "block_size": 16, "hf_overrides": {"a": 1}}, "hf_overrides, quantization"),
        ({"load_format": "dummy"}, "load_format"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
    ],
)
def test_what_changes_the_numbers_is_not_compared(oracle: Script, options: dict[str, Any], given: str) -> None:
    """The oracle has no such options, and what it computes would be blamed on the moves."""
    diagnosis = checked(Script(), **options)
    why = "the oracle loads the model by its name alone, and the engine was given"
    assert f"skipped  {ORACLE}: {why} {given}\n" in str(diagnosis)
    assert oracle.num_starts == 0


def test_what_leaves_the_numbers_is_compared(oracle: Script) -> None:
    diagnosis = checked(Script(), block_size=16, kv_cache_gib=0.5, max_num_batched_tokens=64, revision=None)
    assert [check.is_ok for check in diagnosis.checks if check.name == ORACLE] == [True]


def test_the_oracle_says_what_takes_so_long() -> None:
    said: list[str] = []
    checked(Script(), progress=said.append)
    assert said == [
        "loading m into transformers",
        "weights are on their way",
        "recomputing with transformers what will be compared",
    ]


@pytest.mark.parametrize(
    ("dtype", "model", "limit"),
    [
        ("float16", "m", "(limit 1e-01 in float16, measured on smollm2 alone)"),
        ("bfloat16", "m", "(limit 5e-01 in bfloat16, measured on smollm2 alone)"),
        ("bfloat16", "smollm2", "(limit 5e-01 in bfloat16)"),
        ("float32", "m", "(limit 1e-03 in float32)"),
    ],
)
def test_where_a_bound_was_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, dtype: str, model: str, limit: str
) -> None:
    monkeypatch.setattr(Measured, "dtype", dtype)
    found = [c.detail for c in checked(Script(), model).checks if c.name.endswith("against the oracle")]
    assert len(found) == 2
    assert all(detail.endswith(limit) for detail in found)


def test_numbers_of_a_type_without_a_bound_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Measured, "dtype", "float8")
    assert f"skipped  {ORACLE}: there is no bound for numbers of type float8" in str(checked(Script()))


def test_the_oracle_is_not_compared_with_itself(oracle: Script) -> None:
    with Session("m", engine="oracle") as session:
        diagnosis = diagnose(session)
    assert oracle.num_starts == 1
    assert f"skipped  {ORACLE}: the engine is the oracle" in str(diagnosis)


def test_problems_of_bookkeeping_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def audit(self: ScriptedEngine) -> dict[str, object]:
        return {"problems": ["block 7 has 2 references too many"]}

    monkeypatch.setattr(ScriptedEngine, "audit", audit)
    diagnosis = checked(Script())
    assert failed(diagnosis) == ["bookkeeping"]
    assert "block 7 has 2 references too many" in str(diagnosis)


def test_what_moves_kv_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async def audit(self: ScriptedEngine) -> dict[str, object]:
        return {"problems": [], "moves_by": "torch, many times slower than the compiled kernel: no compiler"}

    monkeypatch.setattr(ScriptedEngine, "audit", audit)
    said = "ok       moves: by torch, many times slower than the compiled kernel: no compiler\n"
    assert said in str(checked(Script()))


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
