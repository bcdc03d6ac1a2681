"""How a function for multi-head attention was graded, in a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwise.theorems.grading import SIGNATURE, Grade, Mark

__all__ = ["grade_summary"]

_STYLES: Final = {
    Mark.PASSED: "green",
    Mark.FAILED: "bold red",
    Mark.UNSUPPORTED: "yellow",
    Mark.UNJUDGED: "dim",
}


def grade_summary(grade: Grade) -> RenderableType:
    """Every requirement with its mark; of a failure, what is wrong and on which smallest input."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(min_width=max(len(each.requirement) for each in grade.results), no_wrap=True)
    table.add_column(min_width=max(len(each.mark) for each in grade.results), no_wrap=True)
    table.add_column(ratio=1, overflow="fold")
    for each in grade.results:
        told = Text(each.asks, style="dim" if each.mark is Mark.PASSED else "")
        if each.mark is not Mark.PASSED:
            told.append(f"\n{each.sentence}", style="bold" if each.mark is Mark.FAILED else "")
        if each.cause:
            told.append(f"\nThese are the numbers of a known mistake: {each.cause}.")
        table.add_row(Text(each.requirement), Text(each.mark, style=_STYLES[each.mark]), told)
    return Group(
        Text(grade.sentence, style="bold"), Text(SIGNATURE, style="dim"), Text(), table
    )  # fmt: skip
