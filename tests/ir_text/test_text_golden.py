"""Texts that somebody can read who has not read the code, and the queries that they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from spanflow.ir.text import format_text, from_text, to_text

HERE = Path(__file__).parent


def _queries() -> ModuleType:
    spec = importlib.util.spec_from_file_location("golden_queries", HERE / "golden_queries.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


QUERIES = _queries()
FILES = sorted((HERE / "golden").glob("*.span"))


def without_comments(source: str) -> str:
    """The golden texts hold no semicolon but for comments."""
    lines = [line.partition(";")[0].rstrip() for line in source.splitlines()]
    return "\n".join(line for line, old in zip(lines, source.splitlines(), strict=True) if line or not old)


def test_each_text_has_its_query() -> None:
    assert [path.stem for path in FILES] == sorted(QUERIES.GOLDEN)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    query = QUERIES.GOLDEN[path.stem]()
    assert from_text(source, filename=path.name, retrievers=QUERIES.ARCHIVES) == query
    assert format_text(source) == source
    assert to_text(query, retrievers=QUERIES.ARCHIVES) == without_comments(source)
    assert from_text(source.replace("\n", "\r\n"), retrievers=QUERIES.ARCHIVES) == query
    assert from_text("\ufeff" + source, retrievers=QUERIES.ARCHIVES) == query
