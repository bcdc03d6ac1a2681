"""The fenced code blocks of a Markdown page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One block: what the fence says it is, and where it begins."""

    language: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """Every fenced block, in order."""
    return [
        Block(match[1].strip(), match[2], text.count("\n", 0, match.start()) + 2)
        for match in _FENCE.finditer(text)
    ]


def commands(block: Block) -> list[str]:
    """The command lines of a shell block; a backslash at the end joins lines."""
    joined = block.code.replace("\\\n", " ")
    lines = [line.split("  #")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))
