"""The caller's environment: what only the start of an engine needs is gone after it. No vLLM is needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from spanflow.engine.environment import cores_left_free, prepare_environment, quiet_start

NAMES = ("PYTHONWARNINGS", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS")


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture(autouse=True)
def before(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A caller who has set nothing of it."""
    for name in list(os.environ):
        if name in NAMES or name.startswith(("VLLM_", "TOKENIZERS_")):
            monkeypatch.delenv(name)
    return environment()


def test_what_stays_is_read_by_vllm_and_tokenizers_alone(before: dict[str, str]) -> None:
    prepare_environment()
    new = environment().keys() - before.keys()
    try:
        assert new
        assert all(name.startswith(("VLLM_", "TOKENIZERS_")) for name in new)
        assert {name: os.environ[name] for name in before} == before
    finally:
        for name in new:
            del os.environ[name]


def test_the_rest_is_there_while_any_engine_starts(before: dict[str, str]) -> None:
    one, other = quiet_start(), quiet_start()
    with one:
        quiet = {name: os.environ[name] for name in NAMES}
        other.__enter__()
    assert {name: os.environ[name] for name in NAMES} == quiet  # the first one is through, the second one is not
    other.__exit__(None, None, None)
    assert environment() == before
    with pytest.raises(KeyError, match="why"), quiet_start():
        raise KeyError("why")
    assert environment() == before


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_LOGS", "+dynamo")
    with quiet_start():
        assert os.environ["TORCH_LOGS"] == "+dynamo"
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")  # by another thread of the program
    assert os.environ["TORCH_LOGS"] == "+dynamo"
    assert os.environ["TORCH_CPP_LOG_LEVEL"] == "INFO"
    assert "PYTHONWARNINGS" not in os.environ


def test_what_one_start_needs_besides_goes_with_the_last(before: dict[str, str]) -> None:
    one, other = quiet_start(), quiet_start({"VLLM_SOMETHING": "1"})
    one.__enter__()
    with other:
        assert os.environ["VLLM_SOMETHING"] == "1"
    one.__exit__(None, None, None)
    assert environment() == before


@pytest.mark.parametrize(
    ("threads_of", "num_workers", "free"),
    [
        ({0: "0"}, 1, None),
        ({0: "0", 1: "1"}, 1, None),  # vLLM would leave two, which is all, so it leaves none
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 1, None),
        ({0: "0", 1: "1", 2: "2"}, 1, "1"),
        ({0: "0", 1: "1", 2: "2"}, 2, None),
        ({number: str(number) for number in range(8)}, 2, "2"),
    ],
)
def test_stock_vllm_has_no_core_more(
    monkeypatch: pytest.MonkeyPatch, threads_of: dict[int, str], num_workers: int, free: str | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(threads_of))
    monkeypatch.setattr(Path, "read_text", lambda path: threads_of[int(path.parts[5].removeprefix("cpu"))] + "\n")
    assert cores_left_free(num_workers).get("VLLM_CPU_NUM_OF_RESERVED_CPU") == free


def test_cores_are_counted_where_the_system_does_not_say_which_are_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})
    monkeypatch.setattr(Path, "read_text", read)
    assert cores_left_free(1) == {"VLLM_CPU_NUM_OF_RESERVED_CPU": "1"}
