"""Advice on queries in the text form: findings have lines, and comments silence them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from spanflow.ir.text import from_text
from spanflow.ir.text.written import Written, WrittenQuery
from spanflow.optimizer.lint.check import lint
from spanflow.optimizer.lint.finding import Finding

_NOQA = re.compile(r"\bnoqa\b(?P<codes>\s*:.*)?", re.I)
_CODE = re.compile(r"[A-Za-z]+[0-9]+")


def lint_text(
    source: str,
    *,
    filename: str = "<query>",
    retrievers: Mapping[str, Any] | None = None,
    ignore: Collection[str] = (),
    max_model_len: int | None = None,
    max_tokens: int = 256,
) -> tuple[Finding, ...]:
    """What `lint` finds in a query in the text form, by the lines and columns where it is written.

    The comment `; noqa: SF001`, on the line before a node or behind it, leaves out what that check finds in it;
    `; noqa` leaves out everything. Raises QuerySyntaxError, and QueryError as `lint` does.

    >>> from spanflow.optimizer.lint import lint_text
    >>> for finding in lint_text('(generate\\n  (user "Rate {answer}."))'):
    ...     print(finding.line, finding.column, finding.code)
    2 9 SF007
    """
    root = from_text(source, filename=filename, retrievers=retrievers)
    findings = lint(root, ignore=ignore, max_model_len=max_model_len, max_tokens=max_tokens)
    if not findings:
        return ()
    placed = _placed(findings, WrittenQuery(source, filename))
    return tuple(sorted(placed, key=lambda finding: (finding.line, finding.column, finding.code)))


def _placed(findings: Collection[Finding], query: WrittenQuery) -> Iterator[Finding]:
    for finding in findings:
        written = query.find(finding.path)
        if not _is_silenced(finding.code, written):
            yield replace(finding, line=written.line, column=written.column)


def _is_silenced(code: str, written: Written) -> bool:
    said = [found["codes"] for comment in written.comments for found in _NOQA.finditer(comment)]
    return any(codes is None or code in _CODE.findall(codes.upper()) for codes in said)
