"""The cost of a measured model, as a section of its page."""

from __future__ import annotations

from typing import Any

import xarray as xr

from headwise.cost.planner import cost
from headwise.errors import HeadwiseError
from headwise.report.cost_page import (
    CostSection,
    CostTable,
    components,
    crossover_table,
    memory_tables,
    passes,
)
from headwise.report.cost_plots import plots
from headwise.report.quantities import about

__all__ = ["cost_section"]


def cost_section(dataset: xr.Dataset) -> CostSection | None:
    """Arithmetic, crossovers and memory at the length that was measured; None without sizes.

    Planned figures stand beside counted ones: parameters of the model in memory, and FLOPs of the
    same model on the meta device.
    """
    facts = about(dataset).get("cost")
    if not isinstance(facts, dict):
        return None
    try:
        found = cost(facts["config"], length=int(facts["length"]))
    except (HeadwiseError, KeyError, TypeError, ValueError):
        return None  # a scan from another version: its sizes cannot be read any more
    return CostSection(
        "Cost",
        [found.shares.sentence()],
        plots=plots(found),
        tables=[
            checks(facts["checks"]),
            components(found),
            passes(found),
            crossover_table(found),
            *memory_tables(found),
        ],
    )


def checks(rows: list[list[Any]]) -> CostTable:
    """Predicted beside counted."""
    lines: list[tuple[str, ...]] = [
        (
            str(what),
            f"{predicted:,}",
            f"{counted:,}",
            "equal" if predicted == counted else f"differs by {counted - predicted:+,}",
        )
        for what, predicted, counted in rows
    ]
    columns = (("", False), ("planned from the sizes", True), ("counted", True), ("", False))
    return CostTable(columns, lines)
