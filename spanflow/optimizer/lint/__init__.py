"""Advice on queries, without an engine: what is legal and yet most likely not meant, or slow without need."""

from __future__ import annotations

from spanflow.optimizer.lint.check import CHECKS, lint
from spanflow.optimizer.lint.finding import Finding
from spanflow.optimizer.lint.written import lint_text

__all__ = ["CHECKS", "Finding", "lint", "lint_text"]
