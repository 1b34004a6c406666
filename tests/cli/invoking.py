"""Commands in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from spanflow.cli.app import app


def invoke(*arguments: object, said: str | None = None) -> Result:
    """Run a command; `said` is what stands on its stdin."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=said)
