"""The options that all benchmarks have."""

from __future__ import annotations

import argparse
from pathlib import Path

from spanflow.installing import install_advice

#: What the engines of a benchmark compute on where there is no GPU. vllm: each on as many cores as it takes by itself,
#: the same options less ours. Of two cores that is one for stock and two for ours, so that a part of each factor is
#: not what spans give; the report says so. same: both on all cores.
CORES = ("vllm", "same")


def bare_parser(name: str, about: str, *, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options of a benchmark that needs no engine; a benchmark adds its own."""
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--quick", action="store_true", help="end within two minutes, with few repeats")
    options.add_argument("--json", type=Path, metavar="FILE", help="write machine, versions, rows and figures here")
    options.add_argument("--seed", type=int, default=0, help="what is drawn, and how answers are sampled")
    options.add_argument("--repeats", type=positive, default=repeats, help="rounds; each measures both sides")
    return options


def parser(name: str, about: str, *, repeats: int) -> argparse.ArgumentParser:
    """A parser with the options of a benchmark of engines; a benchmark adds its own."""
    options = bare_parser(name, about, repeats=repeats)
    options.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the result; needs matplotlib")
    options.add_argument("--model", default="smollm2", help="a known name, a directory or a hub name")
    options.add_argument(
        "--cores", choices=CORES, default=CORES[0], help="vllm: as many as each takes by itself; same: both all"
    )
    return options


def positive(text: str) -> int:
    """A whole number of at least 1, or argparse's error."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return value


def whole_numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas between them, in rising order and each once."""
    return tuple(sorted({positive(part.strip()) for part in text.split(",")}))


def check_plot(path: Path | None) -> None:
    """Exit now rather than after the measurement where a plot is wanted and can't be drawn."""
    if path is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SystemExit(f"--plot needs matplotlib ({error}); {install_advice('plot')}") from None
