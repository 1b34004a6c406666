"""The command line. What is heavy is imported by the command that needs it."""

from __future__ import annotations


def main() -> None:
    """The program `spanflow`."""
    from spanflow.cli.app import app

    app(prog_name="spanflow")
