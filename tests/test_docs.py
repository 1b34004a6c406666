"""The README's Python and the examples in docstrings run as they stand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.document import PythonDocStringDocument
from sybil.example import NotEvaluated
from sybil.parsers.doctest import DocTestParser
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "spanflow"
#: Their examples would need torch.
NOT_PURE = {PACKAGE / "engine", PACKAGE / "kernels"}


class DocStrings(PythonDocStringDocument):
    """Docstrings whose examples import what they use, as a reader would have to."""

    def import_document(self, example: Example) -> None:
        """Leave the namespace empty, and the example to its own evaluator."""
        self.pop_evaluator(self.import_document)
        raise NotEvaluated


README = Sybil(parsers=[PythonCodeBlockParser(), SkipParser()])
DOCSTRINGS = Sybil(parsers=[DocTestParser()], document_types={".py": DocStrings})


def examples() -> Iterator[Any]:
    """Each example with its place as name; those of the README that open a session on the default engine need vLLM."""
    for path in [ROOT / "README.md", *sorted(PACKAGE.rglob("*.py"))]:
        if NOT_PURE.intersection(path.parents):
            continue
        sybil = README if path.suffix == ".md" else DOCSTRINGS
        for example in sybil.parse(path):
            starts_engine = "Session(" in str(example.parsed) and "engine=" not in str(example.parsed)
            marks = [pytest.mark.vllm] if path.suffix == ".md" and starts_engine else []
            yield pytest.param(example, id=f"{path.relative_to(ROOT)}:{example.line}", marks=marks)


@pytest.mark.parametrize("example", list(examples()))
def test_example_runs(example: Example) -> None:
    example.evaluate()  # raises SybilFailure, an AssertionError, where the output differs


def test_there_are_examples_to_run() -> None:
    names = [str(parameter.id) for parameter in examples()]
    assert any(name.startswith("spanflow/api/") for name in names)
