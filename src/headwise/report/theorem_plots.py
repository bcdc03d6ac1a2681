"""Plots of prediction against measurement: lines for the theory, dots with errors for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from markupsafe import Markup

from headwise.report.line_plot import Curve, curves, round_ticks
from headwise.theorems import statement

__all__ = ["drawing"]

_THEORY: Final = ("predict", "bound", "theor", "formula", "allows")


def drawing(plot: statement.Plot) -> Markup:
    """The plot as SVG; predictions come first, as lines."""
    predicted = _theory(plot.curves)
    others = [each for each in plot.curves if each not in predicted]
    order = sorted(range(len(plot.places)), key=lambda i: plot.places[i])
    places = [plot.places[i] for i in order]
    return curves(
        places,
        [
            Curve(
                each.name,
                [each.values[i] for i in order],
                [each.errors[i] for i in order] if each.errors else (),
            )
            for each in (*predicted, *others)
        ],
        label=f"{plot.title}: {plot.up} by {plot.across}",
        across=plot.across,
        words=_number,
        across_words=_number,
        joined=len(predicted),
        linked=True,
        across_ticks=places if plot.log[0] else _within(round_ticks(places[0], places[-1]), places),
        log=plot.log,
    )


def _theory(lines: Sequence[statement.Curve]) -> list[statement.Curve]:
    """Those that are called so; else the first one, if it alone has no errors."""
    found = [each for each in lines if any(word in each.name.lower() for word in _THEORY)]
    if not found and len(lines) > 1 and not lines[0].errors and all(x.errors for x in lines[1:]):
        return [lines[0]]
    return found


def _within(ticks: Sequence[float], places: Sequence[float]) -> list[float]:
    return [tick for tick in ticks if places[0] <= tick <= places[-1]]


def _number(value: float) -> str:
    """Without zeros at the end: labels of axes are round."""
    whole = value == int(value) and abs(value) < 1e7
    return f"{value:,.0f}" if whole else f"{value:.3g}".replace("e-0", "e-").replace("e+0", "e")
