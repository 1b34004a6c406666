"""Golden pairs of the laws: what a tree looks like before and after one rule, as text.

A file has the name of its rule. Cases are separated by empty lines. `;` begins a comment, `=>` what comes out:
a tree, `unchanged`, or `error:` and the beginning of the message.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

RULES = Path(__file__).parent / "rules"


class Pair(NamedTuple):
    name: str
    before: str
    after: str


def read_pairs(path: Path) -> list[Pair]:
    pairs = []
    line = 1
    for block in path.read_text().split("\n\n"):
        said = "\n".join(text for text in block.splitlines() if not text.startswith(";"))
        before, arrow, after = said.partition("=>")
        assert arrow, f"{path.name}:{line}: a case without =>"
        pairs.append(Pair(f"{path.stem}:{line}", before.strip(), after.strip()))
        line += block.count("\n") + 2
    return pairs


PAIRS = [pair for path in sorted(RULES.glob("*.span")) for pair in read_pairs(path)]
