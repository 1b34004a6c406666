"""The shape of the project: which part may import which, what is public, how large a file may grow."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

import spanflow

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "spanflow"
CODE = ("*.py", "*.cu", "*.cuh", "*.cpp", "*.h")

#: The parts in walk order, and which of the others each may import. Nothing points back.
MAY_IMPORT: dict[str, Set[str]] = {
    "errors": set(),
    "installing": set(),
    "ir": {"errors"},
    "api": {"errors", "ir"},
    "binding": {"errors", "ir"},
    "optimizer": {"errors", "ir"},
    "lowering": {"errors", "ir", "binding", "optimizer"},
    "kernels": {"errors"},
    "cidra": {"errors"},
    "engine": {"errors", "installing", "ir", "lowering", "kernels", "cidra"},
    "result": {"errors", "ir", "lowering", "engine"},
    "plan": {"errors", "ir", "binding", "optimizer", "lowering", "engine", "result"},
    "runner": {"errors", "ir", "binding", "optimizer", "lowering", "engine", "result", "plan"},
}
# From here on, everything before but the tensors and their moves, which only engines touch.
for part in ("compile", "explain", "session"):
    MAY_IMPORT[part] = MAY_IMPORT.keys() - {"kernels", "cidra"}
for part in ("demo", "doctor", "cli"):
    MAY_IMPORT[part] = {"", *MAY_IMPORT.keys() - {"kernels", "cidra"}}

ANYWHERE = {"numpy"}
MODELS = {"accelerate", "filelock", "gguf", "safetensors", "tokenizers", "torch", "transformers", "vllm"}
#: Packages of others that a part may import, besides numpy.
THIRD_PARTY: dict[str, set[str]] = {
    "ir": {"pydantic"},
    "lowering": {"jinja2"},
    "kernels": MODELS | {"cuda"},
    "cidra": {"networkx"},
    "engine": MODELS | {"prometheus_client", "pydantic"},
    "plan": {"networkx"},
    "demo": {"bm25s", "rich", "typer"},
    "cli": {"rich", "typer"},
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Each (line, absolute name of a module) that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(level=0, module=str() as module):
                yield node.lineno, module
            case ast.ImportFrom():
                pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno}: import by the full name")
            case _:
                pass


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def project_files(*patterns: str) -> Iterator[Path]:
    for folder in (".ci", "spanflow", "integrations", "examples", "tests", "benchmarks"):
        for pattern in patterns:
            yield from (path for path in (ROOT / folder).rglob(pattern) if "results" not in path.parts)
    yield from (path for path in ROOT.iterdir() if path.is_file())


def test_every_part_has_a_place() -> None:
    assert {part_of(path) for path in modules()} <= MAY_IMPORT.keys()


def test_imports_go_one_way() -> None:
    wrong = []
    for path in modules():
        part = part_of(path)
        for line, name in imports_of(path):
            top, _, rest = name.partition(".")
            wanted = rest.partition(".")[0]
            if top == "spanflow" and wanted != part and wanted not in MAY_IMPORT.get(part, set()):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {part} may not import {name}")
    assert wrong == []


def test_packages_of_others_stay_where_they_belong() -> None:
    wrong = []
    for path in modules():
        allowed = ANYWHERE | THIRD_PARTY.get(part_of(path), set()) | set(sys.stdlib_module_names) | {"spanflow"}
        wrong += [
            f"{path.relative_to(ROOT)}:{line}: {name}"
            for line, name in imports_of(path)
            if name.partition(".")[0] not in allowed
        ]
    assert wrong == []


def loaded_by(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_spanflow_is_light() -> None:
    heavy = {"torch", "vllm", "transformers", "networkx", "typer", "rich", "pydantic", "jinja2"}
    assert loaded_by("import spanflow") & heavy == set()


def test_public_names_resolve_and_are_documented() -> None:
    for name in spanflow.__all__:
        value = getattr(spanflow, name)
        assert inspect.getdoc(value), f"spanflow.{name} has no docstring"
    assert set(spanflow.__all__) <= set(dir(spanflow))
    assert list(spanflow.__all__) == sorted(spanflow.__all__)


def test_nothing_of_ours_is_public_by_accident() -> None:
    ours = {
        name
        for name, value in vars(spanflow).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith("spanflow")
    }
    assert ours - set(spanflow.__all__) == set()


def test_each_error_of_ours_that_a_caller_can_meet_is_public() -> None:
    errors = importlib.import_module("spanflow.errors")
    raised = {name for name, value in vars(errors).items() if getattr(value, "__module__", "") == errors.__name__}
    assert raised <= set(spanflow.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'sesion'"):
        spanflow.sesion  # noqa: B018
    assert re.fullmatch(r"\d+\.\d+\.\d+", spanflow.__version__)


def test_files_have_one_job() -> None:
    sizes = {path.relative_to(ROOT): len(path.read_text().splitlines()) for path in project_files(*CODE)}
    assert {str(path): lines for path, lines in sizes.items() if lines > 400} == {}


def test_no_file_names_this_machine_or_a_registry() -> None:
    shared = {"/", "/tmp", "/home"}
    folders = {f"{folder}/" for folder in (ROOT.parent, Path.home()) if str(folder) not in shared}
    hosts = {"".join(host) for host in (("pypi", ".org"), ("python", "hosted.org"))}
    unwanted = folders | hosts | set(filter(None, [os.environ.get("PIP_FIND_LINKS")]))
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in project_files("*.py", "*.md", "*.toml", "*.lock", "*.json", "run", "*.sh")
        if path.name != ".git"
        for text in unwanted
        if text in path.read_text()
    ]
    assert found == []


def test_a_wheel_holds_what_is_read_besides_code() -> None:
    """Hatchling takes all files of the package but those that git ignores, unless it is told otherwise."""
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert build["targets"]["wheel"] == {"packages": ["spanflow"]}
    assert build.keys() == {"targets"}
    data = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    corpus = {"demo/corpus/documents.jsonl", "demo/corpus/questions.jsonl"}
    core = {f"kernels/core/{path.name}" for path in (PACKAGE / "kernels" / "core").iterdir()}
    assert len(core) > 3
    assert corpus | core | {"ir/json/schema.json", "py.typed"} <= data
    names = [f"spanflow/{name}" for name in sorted(data)]
    ignored = subprocess.run(["git", "check-ignore", "--no-index", *names], cwd=ROOT, capture_output=True, text=True)
    if ignored.returncode > 1:
        pytest.skip("this is no git checkout")
    assert ignored.stdout == ""


def test_the_top_level_holds_nothing_else() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is no git checkout")
    expected = {"pyproject.toml", "README.md", "spanflow", "integrations", "examples", "tests", "benchmarks"}
    top = {line.partition("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".") and not name.endswith(".lock")} <= expected
