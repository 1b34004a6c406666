"""The text form of span queries: `(generate (seq (system "...") (commute ...) (user "...")))`."""

from __future__ import annotations

from spanflow.ir.text.format import format_text
from spanflow.ir.text.parser import from_text
from spanflow.ir.text.printer import to_text
from spanflow.ir.text.source import QuerySyntaxError

__all__ = ["QuerySyntaxError", "format_text", "from_text", "to_text"]
