"""Runs a frozen plan on an engine: concurrently, within bounds, with events on the way."""

from spanflow.runner.host import Host
from spanflow.runner.options import ErrorPolicy, RunOptions
from spanflow.runner.run import run_plan

__all__ = ["ErrorPolicy", "Host", "RunOptions", "run_plan"]
