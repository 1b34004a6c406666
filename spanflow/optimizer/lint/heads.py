"""Checks of the beginning of a prompt, which many prompts share only while it stays the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from spanflow.optimizer.lint.finding import Found, Limits
from spanflow.optimizer.lint.reading import Reading

_MONTH = r"(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.?"
_WHEN = (
    rf"(?:\d{{4}}-\d{{2}}-\d{{2}}|\d{{1,2}}[./]\d{{1,2}}[./]\d{{2,4}}|{_MONTH}\s+\d{{1,2}}|\d{{1,2}}\.?\s+{_MONTH}"
    r"|\d{1,2}:\d{2}|\d{10,13})\b"
)
#: What changes from request to request: an instant, the date of today, an identifier.
_CHANGING = {
    "a time": re.compile(r"\b\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(?::\d{2})?|\b\d{1,2}:\d{2}:\d{2}\b"),
    "a date": re.compile(
        r"\b(?:today(?:'s\s+date)?|current\s+(?:date|time|datetime|day)|(?:the|local|utc)\s+(?:date|time)|timestamp|date"
        rf"|now)\b\s*(?:and\s+time\s*)?(?:is|was|:|=|,|\()?\s*[^.\n]{{0,24}}?{_WHEN}",
        re.I,
    ),
    "an identifier": re.compile(
        r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"
        r"|\b(?:session|request|trace|run|conversation|thread)[ _-]?id\b\s*(?:is\b|[:=#])?\s*[\w-]*\d[\w-]{4,}",
        re.I,
    ),
}


def changes_head(reading: Reading, limits: Limits) -> Iterator[Found]:
    """A system message with something in it that changes from request to request."""
    for said in reading.texts:
        if said.role != "system" or said.is_fragment:
            continue
        for what, pattern in _CHANGING.items():
            if found := pattern.search(said.text):
                yield (
                    said.place,
                    f"{found[0]!r} looks like {what}, and with it all that follows the system message is new in each "
                    "request",
                    "say it in the last message, behind what stays the same",
                )
                break
