"""Plots of TTFT against the size of the work, one line a contestant; matplotlib is loaded here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks._measure import Spread


@dataclass(frozen=True)
class Panel:
    """One set of axes: for each line its points, from a size to the times measured, in seconds."""

    title: str
    size_title: str
    lines: Mapping[str, Mapping[int, Spread]]


def draw(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write the panels side by side, with bars from the least to the largest time, and what the lines are beside them.

    Missing folders are made.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(5 * len(panels) + 3, 4.5), squeeze=False, sharey=True, layout="constrained"
    )
    names = dict.fromkeys(name for panel in panels for name in panel.lines)
    colours = dict(zip(names, cycle(mpl.colormaps["tab20"].colors), strict=False))
    drawn = {}
    for axis, panel in zip(axes[0], panels, strict=True):
        for name, points in panel.lines.items():
            drawn[name] = _line(axis, colours[name], points)
        sizes = sorted({size for points in panel.lines.values() for size in points})
        axis.set(title=panel.title, xlabel=panel.size_title, yscale="log", xticks=sizes)
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].set_ylabel("time to first token, s")
    figure.legend(drawn.values(), drawn.keys(), loc="outside right upper", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _line(axis: Any, colour: Any, points: Mapping[int, Spread]) -> Any:
    sizes = sorted(points)
    medians = [points[size].median for size in sizes]
    below = [points[size].median - points[size].low for size in sizes]
    above = [points[size].high - points[size].median for size in sizes]
    return axis.errorbar(sizes, medians, yerr=[below, above], marker="o", capsize=3, color=colour)
