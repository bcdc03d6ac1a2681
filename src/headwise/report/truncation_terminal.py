"""The loss against the rank of the heads, in a terminal."""

from __future__ import annotations

from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headwise.circuits.truncation import Truncation
from headwise.report.numbers import percent
from headwise.report.truncation_facts import (
    alone_sentence,
    loss_words,
    rank_rows,
    signed,
    suggestion,
    title,
)

__all__ = ["COLUMNS", "truncation_summary"]

COLUMNS: Final = ("rank", "loss", "change", "energy: least", "median", "parameters", "of stored")


def truncation_summary(found: Truncation) -> RenderableType:
    """A row per rank, the suggested rank, and which heads bear it alone."""
    name, facts = title(found)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, justify="right", header_style="dim", no_wrap=True)
    for row in rank_rows(found):
        table.add_row(
            str(row.rank),
            loss_words(row.loss),
            signed(row.change),
            percent(row.energy_min),
            percent(row.energy_median),
            f"{row.parameters:,}",
            percent(row.of_stored),
            style="bold" if row.rank == found.suggested else "",
        )
    parts: list[RenderableType] = [
        Text(name, style="bold"),
        Text(" · ".join(facts), style="dim"),
        Text(),
        table,
        Text(),
        Text(suggestion(found), style="bold"),
    ]
    alone = alone_sentence(found)
    return Group(*parts, *([] if alone is None else [Text(alone)]))
