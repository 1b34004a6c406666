"""The command line: results on stdout alone, one message for an error, exit codes that mean something."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.invoking import invoke
from scripted_engine import Script, register

from spanflow import EngineDied, EngineUnavailable, ModelError, SpansUnsupported
from spanflow.cli.settings import engine_options, open_session
from spanflow.doctor import Check
from spanflow.errors import QueryError

QUERY = """
from spanflow import commute, generate, seq, system, user

query = generate(seq(system("Be brief."), user(commute("one text", "another text"), "Which?")), max_tokens=9)
"""


@pytest.fixture
def query_file(tmp_path: Path) -> Path:
    return write(tmp_path, QUERY)


def write(folder: Path, text: str) -> Path:
    path = folder / "question.py"
    path.write_text(text)
    return path


def test_run_prints_the_answer_and_tells_about_it_on_stderr(script: Script, query_file: Path) -> None:
    done = invoke("run", query_file, "--engine", "scripted")
    assert (done.stdout, done.exit_code) == (" fine\n", 0)
    assert "prompt tokens" in done.stderr
    assert "spans: 2 hit" in done.stderr


def test_run_prints_all_samples(script: Script, tmp_path: Path) -> None:
    file = write(tmp_path, "from spanflow import *\nquery = generate(user('hello'), n=2)\n")
    assert invoke("run", file, "--engine", "scripted").stdout == " fine\n\n fine\n"


def test_json_is_exactly_one_document(script: Script, query_file: Path) -> None:
    done = invoke("run", query_file, "--engine", "scripted", "--json", "--rung", "moved")
    document = json.loads(done.stdout)
    assert document["text"] == " fine"
    assert [span["rung"] for span in document["spans"]] == ["moved"] * 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineDied("the engine stopped"), 1),
        (RuntimeError("something else"), 1),
        (QueryError("$: not like this"), 3),
        (EngineUnavailable("not installed; pip install it"), 4),
        (ModelError("no such model"), 4),
        (SpansUnsupported("not with this model"), 4),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_one_message_and_an_exit_code(
    script: Script, query_file: Path, error: Exception, code: int, as_json: bool
) -> None:
    script.start_error = error
    done = invoke("run", query_file, "--engine", "scripted", *["--json"] * as_json)
    assert done.exit_code == code
    assert f"error: {'' if code > 1 or isinstance(error, EngineDied) else 'RuntimeError: '}{error}" in done.stderr
    assert "Traceback" not in done.output
    if as_json:
        assert json.loads(done.stdout) == {"error": type(error).__name__, "message": str(error)}
    else:
        assert done.stdout == ""


def test_debug_shows_the_traceback_on_stderr(script: Script, query_file: Path) -> None:
    script.start_error = RuntimeError("something else")
    done = invoke("run", query_file, "--engine", "scripted", "--debug", "--json")
    assert "Traceback" in done.stderr
    assert json.loads(done.stdout)["error"] == "RuntimeError"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("question = 3\n", "it defines no `query`; add one"),
        ("\n\nquery = 1 / 0\n", "question.py:3: ZeroDivisionError: division by zero"),
        ("query = (\n", "SyntaxError"),
        (
            "from spanflow import commute\nquery = commute()\n",
            "question.py:2: QueryError: commute(): there are no operands",
        ),
        ("query = 7\n", "a session runs a query, text, or a list of messages; got the number 7"),
        ("from spanflow import *\nquery = generate(seq(''))\n", "this generate has nothing to read"),
    ],
)
def test_a_file_without_a_good_query_is_rejected(script: Script, tmp_path: Path, text: str, message: str) -> None:
    done = invoke("run", write(tmp_path, text), "--engine", "scripted")
    assert done.exit_code == 3
    assert message in done.stderr
    assert script.submitted == []


def test_a_file_may_import_its_neighbours(script: Script, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_question.py").write_text("said = 'hello'\n")
    file = write(tmp_path, "from neighbour_of_question import said\nquery = said\n")
    assert invoke("run", file, "--engine", "scripted").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [["run"], ["run", "missing.py"], ["run", "--what"], ["what"], ["demo", "rag", "--questions", "many"], ["demo"], []],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert invoke(*arguments).exit_code == 2


def test_a_number_out_of_range_is_rejected(script: Script) -> None:
    done = invoke("demo", "rag", "--questions", "5000", "--engine", "scripted")
    assert done.exit_code == 3
    assert "num_questions: must be a whole number from 1 to" in done.stderr


def test_explain_starts_no_engine(query_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(start_error=AssertionError("started"))
    register(monkeypatch)
    options = {"script": script, "tokenizer": script.tokenizer, "max_model_len": 77}
    monkeypatch.setattr("spanflow.cli.settings.engine_options", lambda given: options)
    done = invoke("explain", query_file, "--engine", "scripted", "--rung", "moved")
    assert done.exit_code == 0
    assert done.stdout.startswith("G max_tokens=9\n")
    assert "tokens of 77" in done.stdout
    document = json.loads(invoke("explain", query_file, "--engine", "scripted", "--json").stdout)
    assert document["generations"][0]["max_tokens"] == 9
    assert script.num_starts == 0


def test_doctor_shows_what_it_found_and_ends_accordingly(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spanflow.doctor.recompute", lambda session: "no oracle in a test without a model")
    done = invoke("doctor", "--engine", "scripted")
    assert done.exit_code == 0
    assert "skipped  moved spans against the oracle: no oracle in a test without a model" in done.stdout
    assert done.stdout.startswith("python ")
    assert "ok       bookkeeping: no pin is left; idle\nall is well\n" in done.stdout
    document = json.loads(invoke("doctor", "--engine", "scripted", "--json").stdout)
    assert document["is_well"]
    assert document["versions"]["python"]

    async def wrong(host: Any) -> list[Check]:
        return [Check("moved spans", False, "0 of 3 found")]

    monkeypatch.setattr("spanflow.doctor.compare_spans", wrong)
    done = invoke("doctor", "--engine", "scripted")
    assert done.exit_code == 1
    assert "FAILED   moved spans: 0 of 3 found" in done.stdout

    async def fine(host: Any) -> list[Check]:
        return []

    async def differs(host: Any, expected: Any) -> list[Check]:
        return [Check("moved spans against the oracle", False, "they differ", 0.5, 1e-3)]

    monkeypatch.setattr("spanflow.doctor.compare_spans", fine)
    monkeypatch.setattr("spanflow.doctor.compare_with_oracle", differs)
    done = invoke("doctor", "--engine", "scripted", "--json")
    assert done.exit_code == 1
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    found = checks["moved spans against the oracle"]
    assert (found["is_ok"], found["difference"], found["limit"]) == (False, 0.5, 1e-3)
    script.start_error = EngineUnavailable("not installed; pip install it")
    done = invoke("doctor", "--engine", "scripted", "--json")
    assert done.exit_code == 4
    assert json.loads(done.stdout)["checks"][0]["detail"] == "EngineUnavailable: not installed; pip install it"


def test_the_help_of_the_doctor_says_who_recomputes() -> None:
    assert "recomputed on it, and by transformers" in " ".join(invoke("doctor", "--help").stdout.split())


def test_options_of_the_engine_are_json_or_text() -> None:
    given = ["kv_cache_gib=2.5", "enforce_eager=true", "dtype=bfloat16", "name=a=b"]
    assert engine_options(given) == {"kv_cache_gib": 2.5, "enforce_eager": True, "dtype": "bfloat16", "name": "a=b"}
    for wrong in ("kv_cache_gib", "=3", "two words=3"):
        with pytest.raises(QueryError, match="write NAME=VALUE, as in -o kv_cache_gib=2"):
            engine_options([wrong])


@pytest.mark.parametrize(
    ("model", "given", "before", "after"),
    [
        ("smollm2", None, None, "1"),
        ("smollm2", ["kv_cache_gib=2"], None, "1"),
        ("smollm2", None, "0", "0"),
        ("smollm2", ["tokenizer=org/other"], None, None),
        ("smollm2", ['adapters={"a": "org/a"}'], None, None),
        ("org/model", None, None, None),
    ],
)
def test_the_embedded_model_is_looked_for_on_no_hub(
    monkeypatch: pytest.MonkeyPatch, model: str, given: list[str] | None, before: str | None, after: str | None
) -> None:
    if before is None:
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", before)
    open_session(model, "vllm", None, given).close()
    assert os.environ.get("HF_HUB_OFFLINE") == before  # a retriever of the user's may need a hub
    open_session(model, "vllm", None, given, only_our_code=True).close()
    assert os.environ.get("HF_HUB_OFFLINE") == after


def spanflow(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from spanflow.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def test_the_version() -> None:
    done = spanflow("--version")
    assert done.stdout.startswith("spanflow 0.")
    assert done.returncode == 0


def loaded_for_help(program: str) -> set[str]:
    """The packages that a fresh interpreter loads to show the help of `main`, and which parts of ours."""
    code = f"{program}\nimport sys\nsys.argv = ['it', '--help']\ntry:\n    main()\nfinally:\n    print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = done.stdout.splitlines()[-1].split()
    return {name for name in loaded if re.fullmatch(r"(spanflow\.)?\w+", name)} - sys.stdlib_module_names


def test_help_loads_only_what_it_shows() -> None:
    """Besides what any help does: the names of options and commands, and not what they do."""
    bare = "import typer\nmain = typer.Typer()\nmain.command()(print)"
    ours = loaded_for_help("from spanflow.cli import main") - loaded_for_help(bare)
    assert ours <= {"spanflow", *(f"spanflow.{part}" for part in ("api", "cli", "errors", "ir", "optimizer"))}


def test_help_takes_little_processor_time() -> None:
    """A third of a second; what a busy machine makes it wait is not counted."""
    taken = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "doctor" in spanflow("--help").stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert 0 < min(taken) < 0.75


def test_what_other_code_prints_does_not_reach_stdout(tmp_path: Path) -> None:
    noisy = "import os, sys\nprint('noise')\nos.system('echo more noise')\nquery = 7\n"
    done = spanflow("run", write(tmp_path, noisy), "--engine", "simulator", "--json")
    assert json.loads(done.stdout)["error"] == "QueryError"
    assert "noise" in done.stderr
    assert "more noise" in done.stderr
    assert done.returncode == 3


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    file = write(tmp_path, "import time\nprint('there', flush=True)\ntime.sleep(30)\n")
    command = [sys.executable, "-c", "from spanflow.cli import main; main()", "run", str(file)]

    def heed() -> None:  # what was started in the background of a shell ignores it, and so do its children
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed)
    assert process.stderr is not None
    assert process.stderr.readline() == "there\n"
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert (process.returncode, error) == (130, "interrupted\n")
