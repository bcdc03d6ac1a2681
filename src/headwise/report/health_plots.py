"""The plots of monitored runs: losses with alarms, figures over steps, maps of steps and layers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from markupsafe import Markup

from headwise.report.health_facts import FIGURES, Health, Numbers, Table, when_the_loss_shows
from headwise.report.heat_map import Mark, heat_map, scale_of, timeline
from headwise.report.line_plot import Curve, Marker, Plot, curves, round_ticks
from headwise.report.numbers import three

__all__ = [
    "COLUMNS",
    "all_zero",
    "drawn",
    "figure_plots",
    "loss_plot",
    "map_plots",
    "thinned",
    "timeline_plot",
]

COLUMNS: Final = 300  # of a map, and points of a curve
_CELLS: Final = 2000  # of one map: a page stays below a megabyte
_DOTS: Final = 40  # points up to which each has a tooltip
_APART: Final = 5  # layers up to which each has a curve
_BY_MEDIAN: Final = ("gradient", "update")  # both ends of which are worrying
_MARKERS: Final = 3  # as many rows as labels have


def thinned(
    steps: Sequence[int], values: Numbers, most: int, worst: str
) -> tuple[list[tuple[int, int]], Numbers]:
    """At most ``most`` spans of steps (first, last), and the worst known value in each.

    Example:
        >>> thinned([1, 2, 3, 4], np.array([1.0, 5.0, np.nan, 2.0]), 2, "most")
        ([(1, 2), (3, 4)], array([5., 2.]))
    """
    groups = np.array_split(np.arange(len(steps)), min(len(steps), most))
    spans = [(steps[int(group[0])], steps[int(group[-1])]) for group in groups]
    fill = -math.inf if worst == "most" else math.inf
    found = []
    for group in groups:
        part = values[group]
        known = np.where(np.isnan(part), fill, part)
        extreme = known.max(0) if worst == "most" else known.min(0)
        found.append(np.where(np.isnan(part).all(0), math.nan, extreme))
    return spans, np.array(found)


def _words(span: tuple[int, int]) -> str:
    return f"step {span[0]:,}" if span[0] == span[1] else f"steps {span[0]:,} to {span[1]:,}"


def drawn(lines: Sequence[tuple[str, Sequence[int], Numbers]], **options: Any) -> Markup:
    """Curves (name, steps, values) over one axis of steps."""
    places = sorted({step for _, steps, _ in lines for step in steps})
    made = []
    for name, steps, values in lines:
        at = dict(zip(steps, values.tolist(), strict=True))
        made.append(Curve(name, [at.get(place) for place in places]))
    known = [v for line in made for v in line.values if v is not None and math.isfinite(v)]
    if len(places) < 2 or not known:
        return Markup("")
    log = options.pop("log", False) and min(known) > 0 and max(known) > 20 * min(known)
    ticks = [t for t in round_ticks(places[0], places[-1]) if places[0] <= t <= places[-1]]
    return curves(
        places,
        made,
        across="step",
        words=three,
        across_words=lambda value: f"{value:,.0f}",
        across_ticks=[places[0], *ticks],
        log=(False, log),
        joined=None if len(places) <= _DOTS else len(made),
        **options,
    )


def loss_plot(runs: Sequence[Health]) -> Plot | None:
    """The losses, with the first alarms of the first run and the step at which its loss rises."""
    lines = []
    for each in runs:
        if np.isfinite(each.loss).any():
            spans, values = thinned(each.steps, each.loss, COLUMNS, "most")
            lines.append((each.name, [span[1] for span in spans], values))
    if not lines:
        return None
    markers = _markers(runs[0])
    drawing = drawn(lines, label="Loss over steps", markers=markers)
    if not drawing:
        return None
    told = "; dashed: alarms" if markers else ""
    whose = f" of {runs[0].name}" if markers and len(runs) > 1 else ""
    return Plot(f"Loss{told}{whose}", drawing)


def _markers(health: Health) -> list[Marker]:
    """The first alarm of each kind, and where the loss shows it."""
    found: dict[int, str] = {}
    shown = when_the_loss_shows(health)
    most = _MARKERS if shown is None else _MARKERS - 1
    for alarm in health.alarms:
        new = alarm.step not in found and alarm.title not in found.values()
        if alarm.severity != "note" and new and len(found) < most:
            found[alarm.step] = alarm.title
    if shown is not None and found:
        found[shown] = f"{found[shown]}; loss rises" if shown in found else "the loss rises"
    return [Marker(float(step), words) for step, words in found.items()]


def timeline_plot(health: Health) -> Plot | None:
    """Every alarm at its step, a line for each kind."""
    if not health.alarms:
        return None
    marks = [
        Mark(float(a.step), a.title, a.severity, f"step {a.step:,}: {a.sentence}")
        for a in health.alarms
    ]
    low, high = float(health.steps[0]), float(health.steps[-1])
    return Plot("Alarms", timeline(marks, low, high, label=f"Alarms of {health.name} over steps"))


def figure_plots(runs: Sequence[Health]) -> list[Plot]:
    """A plot for each figure that a run has and that is not 0 throughout."""
    found = []
    empty = all_zero(runs)
    for figure in FIGURES:
        if figure.label in empty:
            continue
        lines: list[tuple[str, Sequence[int], Numbers]] = []
        for each in runs:
            table = each.tables.get(figure.key)
            if table is not None:
                lines += _lines(each, table, apart=len(runs) == 1)
        label = f"{figure.label} over steps"
        drawing = drawn(lines, label=label, log=figure.log) if lines else Markup("")
        if drawing:
            unit = f", {figure.unit}" if figure.unit and not figure.unit.startswith("of ") else ""
            found.append(Plot(f"{figure.meaning}{unit}", drawing))
    return found


def all_zero(runs: Sequence[Health]) -> list[str]:
    """Labels of figures that are 0 at every step and layer of every run."""
    found = []
    for figure in FIGURES:
        tables = [each.tables[figure.key].values for each in runs if figure.key in each.tables]
        if tables and not any(np.any(np.nan_to_num(values, nan=0.0)) for values in tables):
            found.append(figure.label)
    return found


def _lines(
    health: Health, table: Table, *, apart: bool
) -> list[tuple[str, Sequence[int], Numbers]]:
    """A curve for each of a few layers; else the ends over layers and the median; of several runs
    one curve each."""
    worst = table.figure.worst
    spans, values = thinned(health.steps, table.values, COLUMNS, worst)
    steps = [span[1] for span in spans]
    if apart and len(table.layers) <= _APART:
        named = [name if " " in name else f"layer {name}" for name in table.layers]
        return [(name, steps, values[:, i]) for i, name in enumerate(named)]
    whose = "" if apart else f"{health.name}: "
    kinds = {"largest": 100.0, "median": 50.0, "smallest": 0.0}
    if not apart:  # one curve a run, in the colour that the run has in the plot of losses
        end = "largest" if worst == "most" else "smallest"
        chosen = "median" if table.figure.key in _BY_MEDIAN else end
        kinds = {chosen: kinds[chosen]}
    return [(f"{whose}{n} of layers", steps, _percentile(values, q)) for n, q in kinds.items()]


def _percentile(values: Numbers, q: float) -> Numbers:
    """Over the layers that are finite; NaN where none is."""
    found = np.full(len(values), math.nan)
    for i, row in enumerate(values):
        known = row[np.isfinite(row)]
        if known.size:
            found[i] = np.percentile(known, q)
    return found


def map_plots(runs: Sequence[Health]) -> list[Plot]:
    """Maps of steps and layers; those of two runs have one scale of colours."""
    found = []
    for figure in FIGURES:
        tables = [
            (h, h.tables[figure.key]) for h in runs if figure.mapped and figure.key in h.tables
        ]
        scale = scale_of([v for _, table in tables for v in table.values.ravel().tolist()])
        if scale is None:
            continue
        for health, table in tables:
            most = max(8, min(COLUMNS, _CELLS // len(table.layers)))
            spans, values = thinned(health.steps, table.values, most, figure.worst)
            drawing = heat_map(
                values.T.tolist(),
                names=table.layers,
                columns=[_words(span) for span in spans],
                scale=scale,
                label=f"{figure.label} by step and layer",
                row_word="layer",
            )
            whose = f"{health.name}: " if len(runs) > 1 else ""
            thin = ""
            if len(spans) < len(health.steps):
                thin = f"; {len(health.steps):,} records in {len(spans)} columns, the "
                thin += "largest" if figure.worst == "most" else "smallest"
                thin += " of each"
            found.append(Plot(f"{whose}{figure.label} by step and layer{thin}", drawing))
    return found
