"""Curves of single heads: those that stand out most, for each figure that heads have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from headwise.report.health_facts import Health, Numbers
from headwise.report.health_plots import COLUMNS, drawn, thinned
from headwise.report.line_plot import Plot

__all__ = ["head_plots"]

_SHOWN: Final = 5  # heads of one plot
# Figure of a record, what it is, which end stands out, and whether the axis is logarithmic.
_FIGURES: Final = (
    ("max_logit", "Largest attention logit", "most", True),
    ("entropy_without_sink_fraction", "Entropy outside the first token, share of the greatest",
     "least", False),
    ("dead_rows_not_sink", "Share of rows with over 0.999 of their weight on one key", "most",
     False),
    ("qk_norm", "Spectral norm of W_QK", "most", True),
    ("ov_norm", "Spectral norm of W_OV", "most", True),
)  # fmt: skip


def head_plots(runs: Sequence[Health]) -> list[Plot]:
    """For each figure and run, the five heads that were farthest out at any step."""
    found = []
    for figure, meaning, worst, log in _FIGURES:
        for health in runs:
            lines = _lines(health, figure, worst)
            if not lines:
                continue
            drawing = drawn(lines, label=f"{meaning} of single heads over steps", log=log)
            if drawing:
                whose = f"{health.name}: " if len(runs) > 1 else ""
                found.append(Plot(f"{whose}{meaning}, the heads that stand out", drawing))
    return found


def _lines(health: Health, figure: str, worst: str) -> list[tuple[str, Sequence[int], Numbers]]:
    table = _table(health, figure)
    sign = 1.0 if worst == "most" else -1.0
    ends = {
        place: float(np.nanmax(sign * values))
        for place, values in table.items()
        if np.isfinite(values).any()
    }
    if not ends or not any(np.nan_to_num(table[place]).any() for place in ends):
        return []
    chosen = sorted(ends, key=lambda place: -ends[place])[:_SHOWN]
    lines: list[tuple[str, Sequence[int], Numbers]] = []
    for number, head in sorted(chosen):
        spans, values = thinned(health.steps, table[number, head], COLUMNS, worst)
        lines.append((f"L{number} · H{head}", [span[1] for span in spans], values))
    return lines


def _table(health: Health, figure: str) -> dict[tuple[int, int], Numbers]:
    """(number of the layer, head) → values by record; NaN where a record has none.

    Layers of several stacks that share a number are told apart by nothing here, so the more
    extreme one would hide the other: only self-attention of the first stack is read.
    """
    found: dict[tuple[int, int], Numbers] = {}
    owner: dict[int, str] = {}
    count = len(health.run.records)
    for i, record in enumerate(health.run.records):
        for layer in record.layers:
            if layer.role != "self" or owner.setdefault(layer.number, layer.module) != layer.module:
                continue
            for head, value in enumerate(layer.figures.get(figure, ())):
                row = found.setdefault((layer.number, head), np.full(count, math.nan))
                row[i] = value
    return found
