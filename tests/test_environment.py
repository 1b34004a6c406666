"""The set-up of the environment: what it says when something fails, and when it does nothing. No network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A checkout with locks of its own, whose environment is a folder without a Python."""
    (tmp_path / "requirements.lock").write_text("numpy==1.0\ntorch==2.0+cpu\n")
    (tmp_path / "requirements-dev.lock").write_text("pytest==1.0\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    venv = tmp_path / ".venv"
    venv.mkdir()
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    monkeypatch.setattr(environment, "VENV", venv)
    monkeypatch.setattr(environment, "_interpreter", lambda: Path(sys.executable))
    return tmp_path


@pytest.fixture
def installs(environment: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been installed, as lists of locks."""
    calls: list[list[str]] = []
    monkeypatch.setattr(environment, "_install", lambda python, locks: calls.append(locks))
    return calls


def test_a_second_call_does_nothing(environment: ModuleType, checkout: Path, installs: list[list[str]]) -> None:
    environment.prepare(dev=True)
    environment.prepare(dev=True)
    environment.prepare()
    assert installs == [["requirements.lock", "requirements-dev.lock"]]


def test_tests_need_more_than_the_demo(environment: ModuleType, checkout: Path, installs: list[list[str]]) -> None:
    environment.prepare()
    environment.prepare(dev=True)
    assert installs == [["requirements.lock"], ["requirements.lock", "requirements-dev.lock"]]


@pytest.mark.parametrize("changed", ["requirements.lock", "pyproject.toml"])
def test_a_changed_file_brings_it_up_to_date(
    environment: ModuleType, checkout: Path, installs: list[list[str]], changed: str
) -> None:
    environment.prepare()
    with (checkout / changed).open("a") as file:
        file.write("\n")
    environment.prepare()
    assert len(installs) == 2


def test_an_interrupted_install_leaves_no_stamp(
    environment: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "_install", lambda python, locks: None)
    environment.prepare()
    (checkout / "requirements.lock").write_text("numpy==2.0\n")

    def interrupted(python: Path, locks: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(environment, "_install", interrupted)
    with pytest.raises(SystemExit) as stopped:
        environment.run(["-c", "pass"])
    assert stopped.value.code == 130
    assert "carries on" in capsys.readouterr().out
    assert not (checkout / ".venv" / environment._STAMP).exists()


def test_a_stamp_that_cannot_be_read_counts_as_none(
    environment: ModuleType, checkout: Path, installs: list[list[str]]
) -> None:
    for content in ("", "[]", "{}", json.dumps({"root": str(checkout), "pyproject": "x", "locks": None})):
        (checkout / ".venv" / environment._STAMP).write_text(content)
        environment.prepare()
    assert len(installs) == 4


def fake_pip(text: str, code: int) -> list[str]:
    return [sys.executable, "-c", f"print({text!r}); raise SystemExit({code})"]


@pytest.mark.parametrize(
    ("output", "advice"),
    [
        ("ERROR: [Errno 28] No space left on device", "free about 4 GB"),
        ("ERROR: No matching distribution found for x==1", "no build of this package"),
        ("WARNING: Retrying: Connection refused", "check the network"),
        ("[Errno 13] Permission denied: '/x'", "must be writable"),
        ("something else", "the lines above say why"),
    ],
)
def test_a_failing_pip_says_what_failed_and_what_to_do(environment: ModuleType, output: str, advice: str) -> None:
    with pytest.raises(environment.SetupError) as failure:
        environment._pip(fake_pip(output, 1), environment._Progress(1))
    message = str(failure.value)
    assert output in message
    assert advice in message
    assert message.endswith("then run this again")


def test_progress_counts_packages(environment: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    environment._pip(
        fake_pip("Collecting numpy==2.4.6\nInstalling collected packages: a, b", 0), environment._Progress(1)
    )
    assert capsys.readouterr().out == "  [1/1] numpy\n  unpacking 2 packages\n"


def test_torch_comes_from_its_own_index_only_where_pip_finds_none(
    environment: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def pip(command: list[str], progress: object) -> None:
        calls.append(command[command.index("--disable-pip-version-check") + 1 :])
        if calls[-1] == ["torch==2.0+cpu"]:
            raise environment.SetupError("ERROR: No matching distribution found for torch==2.0+cpu")

    monkeypatch.setattr(environment, "_pip", pip)
    ran: list[list[str]] = []
    monkeypatch.setattr(environment.subprocess, "run", lambda command, **options: ran.append(command))
    environment._install(Path(sys.executable), ["requirements.lock", "requirements-dev.lock"])
    assert calls == [
        ["torch==2.0+cpu"],
        ["torch==2.0+cpu", "--index-url", environment.TORCH_CPU_INDEX],
        ["numpy==1.0", "pytest==1.0", "-e", str(checkout)],
    ]
    assert ["compileall" in command or "resolve_model" in command[-1] for command in ran] == [True, True]


@pytest.mark.torch
def test_the_model_is_unpacked_by_code_that_runs(environment: ModuleType, model_dir: Path) -> None:
    assert subprocess.run([sys.executable, "-c", environment._UNPACK_MODEL], check=False).returncode == 0


def test_another_failure_of_torch_is_not_retried(
    environment: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pip(command: list[str], progress: object) -> None:
        raise environment.SetupError("No space left on device")

    monkeypatch.setattr(environment, "_pip", pip)
    with pytest.raises(environment.SetupError, match="No space left"):
        environment._install(Path(sys.executable), ["requirements.lock"])


def test_a_python_that_does_not_fit_is_named_with_the_one_wanted(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(environment, "_version_of", lambda name: (3, 12) if name == "python3.12" else None)
    with pytest.raises(environment.SetupError, match=r"Python 3\.9, and .* 3\.11 to 3\.12 .* with python3\.12"):
        environment.prepare()
    monkeypatch.setattr(environment, "_version_of", lambda name: None)
    with pytest.raises(environment.SetupError, match=r"install Python 3\.11"):
        environment.prepare()


def test_an_environment_of_another_python_is_not_touched(
    environment: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(environment, "VENV", tmp_path)
    monkeypatch.setattr(environment, "_version_of", lambda python: (3, 10))
    with pytest.raises(environment.SetupError, match=r"holds Python 3\.10, .* move it away"):
        environment._interpreter()
    assert tmp_path.exists()


def test_all_commands_start_with_nothing_but_the_standard_library() -> None:
    code = (
        "import runpy, sys\n"
        "for path in ('tests', 'examples/rag', 'examples/judge'):\n"
        "    runpy.run_path(path + '/__main__.py', run_name='read_only')\n"
        "known = sys.stdlib_module_names | {'__main__', 'environment'}\n"
        "assert {name.split('.')[0] for name in sys.modules} <= known, sys.modules.keys() - known\n"
    )
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
