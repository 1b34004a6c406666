"""Commands on queries in files: which forms are read, formatting, advice, stages and shapes of explanations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli.invoking import invoke
from scripted_engine import Script
from typer.testing import Result

from spanflow import commute, from_text, generate, retrieve, seq, system, to_json_text, to_spnl, to_text, user
from spanflow.optimizer.lint import CHECKS

QUERY = generate(seq(system("Be brief."), user(commute("one text", "another text"), "Which?")), max_tokens=9)
TIDY = to_text(QUERY) + "\n"
UNTIDY = TIDY.replace("(seq", "(✶ ; in order\n")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def run(file: object, *arguments: object, said: str | None = None) -> Result:
    return invoke("run", file, "--engine", "scripted", *arguments, said=said)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("q.span", TIDY),
        ("q.span", "\ufeff" + TIDY),
        ("q.json", to_json_text(QUERY)),
        ("q.json", json.dumps(to_spnl(generate(user("Which?"), max_tokens=9), model="smollm2"))),
        ("q.py", "from spanflow import *\nquery = generate(user('Which?'), max_tokens=9)\n"),
        ("q.py", 'query = {"spanflow": 1, "query": {"type": "user", "parts": ["Which?"]}}\n'),
        ("-", TIDY),
        ("-", f" {to_json_text(QUERY, indent=2)}"),
    ],
)
def test_each_form_runs(script: Script, tmp_path: Path, name: str, text: str) -> None:
    done = run("-", said=text) if name == "-" else run(write(tmp_path / name, text))
    assert (done.stdout, done.exit_code) == (" fine\n", 0)
    assert "Which?" in script.texts()[0]


RETRIEVAL = '(generate (seq (retrieve :from docs :k 1 "blue") (user "Which?")))'


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a retriever, beside the queries."""
    write(
        tmp_path / "corpus_of_test.py", "class Docs:\n    def search(query):\n        return ['The sky is ' + query]\n"
    )
    monkeypatch.delitem(sys.modules, "corpus_of_test", raising=False)


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("q.span", RETRIEVAL),
        ("q.json", to_json_text(from_text(RETRIEVAL, retrievers={"docs": str.split}), retrievers={"docs": str.split})),
    ],
)
def test_retrievers_are_named_on_the_command_line(script: Script, tmp_path: Path, name: str, text: str) -> None:
    file = write(tmp_path / name, text)
    assert run(file, "--retriever", "docs=corpus_of_test:Docs.search").exit_code == 0
    assert "The sky is blue" in script.texts()[0]
    before = list(sys.path)
    done = run(file)
    assert (done.exit_code, sys.path) == (3, before)
    assert "there is no retriever 'docs'" in done.stderr
    assert "--retriever docs=module:attr" in done.stderr
    assert name in done.stderr


@pytest.mark.usefixtures("corpus")
def test_a_python_file_may_name_retrievers_of_the_json_form(script: Script, tmp_path: Path) -> None:
    text = (
        "from corpus_of_test import Docs\nretrievers = {'docs': Docs.search}\n"
        'query = {"spanflow": 1, "query": {"type": "retrieve", "from": "docs", "query": "blue"}}\n'
    )
    assert run(write(tmp_path / "q.py", text)).exit_code == 0
    assert "The sky is blue" in script.texts()[0]
    done = run(write(tmp_path / "q.py", text.replace("{'docs': Docs.search}", "[Docs.search]")))
    assert done.exit_code == 3
    assert "`retrievers` must be a dict of retrievers by name, got list" in done.stderr


@pytest.mark.usefixtures("corpus")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("docs", "write NAME=module:attr, as in --retriever docs=my_corpus:search"),
        ("docs=corpus_of_test", "write NAME=module:attr"),
        ("docs=no_such_module:it", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("docs=corpus_of_test:it", "AttributeError: module 'corpus_of_test' has no attribute 'it'"),
    ],
)
def test_a_wrong_retriever_is_rejected(script: Script, tmp_path: Path, given: str, message: str) -> None:
    done = run(write(tmp_path / "q.span", RETRIEVAL), "--retriever", given)
    assert done.exit_code == 3
    assert f"--retriever {given!r}: " in done.stderr
    assert message in done.stderr


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("q.span", b'(generate (usr "x"))', "q.span:1:12: 'usr' is no operator; did you mean 'user'?"),
        (
            "q.json",
            b'{"spanflow": 1, "query": {"type": "usr"}}',
            "q.json: $.query.type: the text 'usr' is no type of a node",
        ),
        ("q.json", b"{", "q.json: $: not JSON: expected a key in double quotes, got the end (line 1, column 2)"),
        ("q.span", b"\xff", "q.span: byte 0 is no UTF-8; write the file in UTF-8"),
        ("q.txt", b"hello", "q.txt: expected a name that ends in .py (Python that defines `query`), .span"),
    ],
)
def test_a_file_that_says_no_query_is_rejected(
    script: Script, tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(data)
    done = run(tmp_path / name)
    assert done.exit_code == 3
    assert message in done.stderr
    assert script.num_starts == 0


NESTED = '(generate :max_tokens 9 (seq (seq (system "Be brief.")) (user (commute "one text" "another text") "Which?")))'


def explained(*arguments: object) -> Result:
    return invoke("explain", "-", "--engine", "scripted", *arguments, said=NESTED)


def test_explanations_have_stages_and_shapes(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"script": script, "tokenizer": script.tokenizer, "max_model_len": 300}
    monkeypatch.setattr("spanflow.cli.settings.engine_options", lambda given: options)
    overview = explained().stdout
    assert overview.startswith("G max_tokens=9\n")
    assert "\npass simplify: " in overview
    passes = explained("--stage", "passes").stdout
    assert passes.startswith("pass desugar: changed nothing\n  first: ")
    assert "\n  G max_tokens=9\n  └─ ✶\n" in passes
    assert "stage 0" not in passes
    spans = explained("--stage", "spans").stdout
    assert spans.startswith("G max_tokens=9\n")
    assert "\n  span [" in spans
    assert "pass" not in spans
    assert explained("--stage", "all").stdout == f"{passes}\n{spans}"
    assert explained("--format", "mermaid").stdout.startswith('flowchart TD\n    n0["G max_tokens=9"]\n')
    assert set(json.loads(explained("--stage", "passes", "--format", "json").stdout)) == {"passes"}
    assert "generations" in json.loads(explained("--stage", "spans", "--json").stdout)
    assert script.num_starts == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", "-", "--stage", "tokens"],
        ["explain", "-", "--json", "--format", "mermaid"],
        ["explain", "-", "--stage", "passes", "--format", "mermaid"],
        ["lint", "-", "--ignore", "SF999"],
        ["lint", "-", "--max-model-len", "0"],
        ["fmt"],
        ["fmt", "missing.span"],
        ["lint", "no_such_folder"],
        ["explain", "."],
    ],
)
def test_wrong_usage_is_2(arguments: list[str]) -> None:
    assert invoke(*arguments, said=TIDY).exit_code == 2


def test_fmt_formats_in_place_and_keeps_comments(tmp_path: Path) -> None:
    tidy, untidy = write(tmp_path / "tidy.span", TIDY), write(tmp_path / "untidy.span", UNTIDY)
    done = invoke("fmt", tidy, untidy)
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"reformatted {untidy}: +" in done.stderr
    assert done.stderr.endswith("\n1 file reformatted, 1 file formatted already\n")
    assert "; in order" in untidy.read_text()
    assert from_text(untidy.read_text()) == QUERY
    assert tidy.read_text() == TIDY
    assert invoke("fmt", untidy).stderr == "1 file formatted already\n"


def test_fmt_checks_without_writing(tmp_path: Path) -> None:
    file = write(tmp_path / "untidy.span", UNTIDY)
    done = invoke("fmt", file, "--check")
    assert done.exit_code == 1
    assert f"would reformat {file}: +3 -2 lines\n1 file would be reformatted\n" == done.stderr
    assert file.read_text() == UNTIDY
    assert invoke("fmt", write(tmp_path / "tidy.span", TIDY), "--check").exit_code == 0


def test_fmt_shows_what_would_change(tmp_path: Path) -> None:
    file = write(tmp_path / "untidy.span", UNTIDY)
    done = invoke("fmt", file, "--diff")
    assert done.exit_code == 1
    assert done.stdout.startswith(f"--- {file}\n+++ {file}\n@@ -1,")
    assert {"-  (✶ ; in order", "+  (seq ; in order"} < set(done.stdout.splitlines())
    assert file.read_text() == UNTIDY
    done = invoke("fmt", "-", "--diff", said='(user "x")')
    assert done.stdout.endswith('-(user "x")\n\\ No newline at end of file\n+(user "x")\n')
    assert invoke("fmt", write(tmp_path / "tidy.span", TIDY), "--diff").output == "1 file formatted already\n"


def test_a_directory_stands_for_the_files_of_the_text_form_below_it(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    files = [write(tmp_path / "a.span", UNTIDY), write(tmp_path / "below" / "b.span", NUMBERED)]
    write(tmp_path / "not.json", "{}")
    done = invoke("lint", tmp_path)
    assert (done.exit_code, done.stderr) == (1, "2 findings in 2 files\n")
    assert done.stdout.startswith(f"{files[1]}:1:31: ")
    assert invoke("fmt", tmp_path).stderr.endswith("\n2 files reformatted\n")
    (tmp_path / "empty").mkdir()
    done = invoke("fmt", tmp_path / "empty")
    assert done.exit_code == 2
    assert "there is no .span file below" in done.stderr


def test_lint_shows_what_it_checks() -> None:
    done = invoke("lint", "--checks")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [f"{check.code}  {check.what}" for check in CHECKS]
    for arguments in (("--checks", "--json"), ("--json", "--checks", "-")):
        assert json.loads(invoke("lint", *arguments).stdout) == {check.code: check.what for check in CHECKS}
    assert invoke("lint").exit_code == 2


def test_codes_to_ignore_may_stand_in_a_list() -> None:
    found = [
        invoke("lint", "-", *ignored, said='(G (x (S "Today is 2025-05-03.") (+ (U "{answer}") (U "See above."))))')
        for ignored in ([], ["--ignore", "sf001, SF005"], ["--ignore", "SF001,SF005", "--ignore", "SF007"])
    ]
    assert [done.stdout.count("SF0") for done in found] == [3, 1, 0]


def test_fmt_of_stdin_goes_to_stdout() -> None:
    done = invoke("fmt", "-", said="(U  'hello')")
    assert done.exit_code == 3
    done = invoke("fmt", "-", said='(U  "hello")')
    assert (done.exit_code, done.stdout) == (0, '(user "hello")\n')
    assert invoke("fmt", "-", "--check", said='(U  "hello")').stdout == ""


def test_fmt_leaves_what_is_no_query_and_formats_the_others(tmp_path: Path) -> None:
    wrong, untidy = write(tmp_path / "wrong.span", "(generate"), write(tmp_path / "untidy.span", UNTIDY)
    done = invoke("fmt", wrong, write(tmp_path / "q.json", "{}"), untidy)
    assert done.exit_code == 3
    assert f"error: {wrong}:1:" in done.stderr
    assert "only the text form is formatted, in files that end in .span" in done.stderr
    assert wrong.read_text() == "(generate"
    assert untidy.read_text() != UNTIDY
    assert invoke("fmt", "-", said=RETRIEVAL).exit_code == 0  # retrievers may have any name


def test_fmt_says_as_json_what_became_of_each_file(tmp_path: Path) -> None:
    tidy, untidy = write(tmp_path / "tidy.span", TIDY), write(tmp_path / "untidy.span", UNTIDY)
    wrong = write(tmp_path / "wrong.span", "(generate")
    diff = invoke("fmt", untidy, "--diff").stdout

    def formatted(*arguments: object, code: int, said: str | None = None) -> list[dict[str, object]]:
        done = invoke("fmt", *arguments, "--json", said=said)
        assert done.exit_code == code
        document = json.loads(done.stdout)
        assert document.keys() == {"files"}
        return list(document["files"])

    (changed,) = formatted(untidy, "--check", code=1)
    text = str(changed["text"])
    assert changed == {"file": str(untidy), "is_changed": True, "text": text, "error": None}
    assert formatted(untidy, "--diff", code=1) == [
        {"file": str(untidy), "is_changed": True, "diff": diff, "error": None}
    ]
    assert untidy.read_text() == UNTIDY
    refused, *others = formatted(wrong, tidy, untidy, code=3)
    assert others == [{"file": str(tidy), "is_changed": False, "text": TIDY, "error": None}, changed]
    assert (refused["file"], refused["is_changed"], refused["text"]) == (str(wrong), False, None)
    assert str(refused["error"]).startswith(f"{wrong}:1:")
    assert (untidy.read_text(), wrong.read_text()) == (text, "(generate")
    assert formatted(untidy, "--diff", code=0)[0]["diff"] == ""
    assert formatted("-", code=0, said='(U  "hello")') == [
        {"file": "<stdin>", "is_changed": True, "text": '(user "hello")\n', "error": None}
    ]


def test_fmt_goes_on_behind_a_file_that_it_may_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write(tmp_path / name, UNTIDY) for name in ("a.span", "b.span")]
    write_bytes = Path.write_bytes

    def refuse(path: Path, data: bytes) -> int:
        if path == files[0]:
            raise PermissionError(13, "Permission denied", str(path))
        return write_bytes(path, data)

    monkeypatch.setattr(Path, "write_bytes", refuse)
    done = invoke("fmt", *files, "--json")
    assert done.exit_code == 3
    first, second = json.loads(done.stdout)["files"]
    assert (first["is_changed"], first["error"]) == (False, f"[Errno 13] Permission denied: '{files[0]}'")
    assert (second["is_changed"], files[1].read_text()) == (True, second["text"])
    assert done.stderr.endswith("1 file reformatted, 1 file could not be read or written\n")


NUMBERED = '(generate (seq (commute (user "Document 1: sky.") (user "Document 2: sea.")) (user "Blue?")))'


def test_lint_ends_with_1_where_it_finds_something(tmp_path: Path) -> None:
    file = write(tmp_path / "q.span", NUMBERED)
    done = invoke("lint", file)
    assert done.exit_code == 1
    assert done.stdout.startswith(f"{file}:1:31: SF001 'Document 1:' speaks of an order")
    assert done.stderr == "2 findings in 1 file\n"
    document = json.loads(invoke("lint", file, "--json").stdout)
    assert document["errors"] == []
    assert {(finding["file"], finding["code"]) for finding in document["findings"]} == {(str(file), "SF001")}
    assert document["findings"][0].keys() == {"file", "code", "path", "reason", "fix", "line", "column"}
    assert [(finding["line"], finding["column"]) for finding in document["findings"]] == [(1, 31), (1, 57)]
    assert (invoke("lint", file, "--ignore", "SF001").stdout, invoke("lint", file, "--ignore", "SF001").exit_code) == (
        "",
        0,
    )


def test_lint_reads_every_form_and_asks_no_retriever(tmp_path: Path) -> None:
    query = generate(seq(retrieve(str.split, "blue"), user("Which?")))
    files = [
        write(tmp_path / "q.span", RETRIEVAL),
        write(tmp_path / "q.json", to_json_text(query)),
        write(tmp_path / "q.py", "query = 'Which?'\n"),
        write(tmp_path / "r.py", 'query = {"spanflow": 1, "query": {"type": "retrieve", "from": "x", "query": "b"}}\n'),
    ]
    done = invoke("lint", *files)
    assert (done.stdout, done.exit_code) == ("", 0)


def test_lint_knows_the_window() -> None:
    long = (
        f'(generate (seq (commute {" ".join(f"""(user "{chr(97 + i) * 400}")""" for i in range(5))}) (user "Which?")))'
    )
    assert invoke("lint", "-", said=long).exit_code == 0
    done = invoke("lint", "-", "--max-model-len", "100", said=long)
    assert done.exit_code == 1
    assert done.stdout.startswith("<stdin>:1:16: SF004 ")


def test_lint_knows_paths_where_there_are_no_lines(tmp_path: Path) -> None:
    file = write(tmp_path / "q.json", to_json_text(from_text(NUMBERED)))
    done = invoke("lint", file)
    assert done.exit_code == 1
    assert done.stdout.startswith(f"{file}: $.query.operands[0].operands[0].parts[0]: SF001 ")
    assert invoke("lint", "-", said=file.read_text()).stdout.startswith("<stdin>: $.query.operands[0]")
    (first, _) = json.loads(invoke("lint", file, "--json").stdout)["findings"]
    assert (first["line"], first["column"]) == (None, None)


def test_lint_is_silenced_by_comments() -> None:
    silenced = NUMBERED.replace("(commute", "; noqa: SF001\n(commute")
    done = invoke("lint", "-", said=silenced)
    assert (done.exit_code, done.output) == (0, "nothing found in 1 file\n")


def test_lint_goes_on_behind_a_file_that_is_no_query(tmp_path: Path) -> None:
    wrong, seven = write(tmp_path / "wrong.span", "(generate"), write(tmp_path / "seven.py", "query = 7\n")
    done = invoke("lint", wrong, seven, write(tmp_path / "q.span", NUMBERED), "--json")
    assert done.exit_code == 3
    document = json.loads(done.stdout)
    assert [error["file"] for error in document["errors"]] == [str(wrong), str(seven)]
    assert document["errors"][1]["message"].startswith(f"{seven}: a session runs a query")
    assert document["findings"]
    assert invoke("lint", wrong).exit_code == 3
