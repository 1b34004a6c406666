"""What a benchmark says in the end: a table, JSON with rows and figures, and where both come from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks._machine import Machine
from benchmarks._measure import Spread

Cell: TypeAlias = str | int | float | bool | None
Row: TypeAlias = dict[str, Cell]


@dataclass
class Report:
    """The outcome of one benchmark. `rows` are flat; `figures` are names with numbers; `notes` say what to know."""

    benchmark: str
    machine: Machine
    versions: Mapping[str, str]
    seed: int
    sizes: Mapping[str, Any]
    rows: list[Row] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """The report as plain values. Raises ValueError for a figure that is no finite number, or a nested row."""
        for name, value in self.figures.items():
            if not math.isfinite(value):
                raise ValueError(f"figures[{name!r}] is {value!r}; a figure is a finite number")
        for place, row in enumerate(self.rows):
            for name, cell in row.items():
                if not isinstance(cell, str | int | float | None):
                    raise ValueError(f"rows[{place}][{name!r}] is a {type(cell).__name__}; a row is flat")
        return {
            "benchmark": self.benchmark,
            "machine": asdict(self.machine) | {"quiet": self.machine.is_quiet},
            "versions": dict(self.versions),
            "seed": self.seed,
            "sizes": dict(self.sizes),
            "rows": self.rows,
            "figures": {name: round(float(value), 6) for name, value in self.figures.items()},
            "notes": self.notes,
        }

    def write(self, path: Path) -> None:
        """Write the report as JSON; missing folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")

    def heading(self) -> str:
        """Machine, versions, seed and sizes, as they stand above the table."""
        named = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        sizes = ", ".join(f"{name} {value}" for name, value in self.sizes.items())
        lines = [
            f"{self.benchmark}",
            f"machine   {self.machine}",
            f"versions  {named}",
            f"seed      {self.seed}",
            f"sizes     {sizes}",
        ]
        if self.machine.warning:
            lines.append(f"WARNING   {self.machine.warning}")
        return "\n".join(lines)

    def footing(self) -> str:
        """Figures and notes, as they stand below the table."""
        width = max(map(len, self.figures), default=0)
        lines = [f"  {name:<{width}}  {value:.3g}" for name, value in self.figures.items()]
        return "\n".join(["figures", *lines, *(f"note: {note}" for note in self.notes)])


def text_table(columns: Mapping[str, str], rows: Sequence[Mapping[str, Cell]]) -> str:
    """A table with a title for each key in `columns`; numbers stand at the right, what a row lacks is left blank."""
    cells = [[_text(row.get(key)) for key in columns] for row in rows]
    titles = list(columns.values())
    widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
    to_right = [any(isinstance(row.get(key), int | float) for row in rows) for key in columns]

    def line(texts: Sequence[str]) -> str:
        placed = (t.rjust(w) if right else t.ljust(w) for t, w, right in zip(texts, widths, to_right, strict=True))
        return "  ".join(placed).rstrip()

    return "\n".join([line(titles), "  ".join("-" * width for width in widths), *map(line, cells)])


def seconds(value: Spread) -> str:
    """A time with its range, such as `0.131 (0.128-0.140)`."""
    return f"{value.median:.3f} ({value.low:.3f}-{value.high:.3f})"


def times(value: Spread) -> str:
    """A ratio with its range, such as `14.6x (13.9-15.2)`."""
    return f"{_short(value.median)}x ({_short(value.low)}-{_short(value.high)})"


def listed(values: Sequence[float]) -> str:
    """All times of a row in the order in which they were measured, for JSON."""
    return " ".join(f"{value:.4f}" for value in values)


def _short(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _text(cell: Cell) -> str:
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:.3g}" if abs(cell) < 100 and not cell.is_integer() else f"{cell:.0f}"
        case _:
            return str(cell)
