"""The commands that the README shows, as a shell would split them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def shown_commands(*program: str) -> list[list[str]]:
    """The arguments of each command in a console block that starts with these words."""
    blocks = re.findall(r"^```console\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ ")]
    commands = [shlex.split(line, comments=True) for line in lines]
    return [command[len(program) :] for command in commands if command[: len(program)] == [*program]]
