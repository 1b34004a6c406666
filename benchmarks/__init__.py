"""Measurements of the package; each is a module of its own, run with `python -m benchmarks.NAME`."""
