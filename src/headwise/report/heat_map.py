"""Maps of numbers by column and row, and marks in time, as SVG that needs no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from headwise.report.numbers import three

__all__ = ["Mark", "Scale", "heat_map", "scale_of", "timeline", "viridis"]

_VIRIDIS: Final = (
    (68, 1, 84), (72, 20, 103), (72, 38, 119), (69, 55, 129), (63, 71, 136), (57, 85, 140),
    (50, 100, 142), (45, 113, 142), (40, 125, 142), (35, 138, 141), (31, 150, 139), (32, 163, 134),
    (41, 175, 127), (61, 188, 116), (86, 198, 103), (117, 208, 84), (149, 216, 64), (186, 222, 40),
    (220, 227, 25), (253, 231, 37),
)  # fmt: skip
_WIDTH: Final = 640
_LEFT: Final = 80
_RIGHT: Final = 14
_ACROSS: Final = _WIDTH - _LEFT - _RIGHT
_MOST_ROWS: Final = 14  # labels of rows
_LETTER: Final = 6.4  # pixels, of 11 px type
_LOG: Final = 20.0  # times the least value from which on colours are of logarithms


def viridis(share: float) -> str:
    """The colour at a place from 0 to 1 of the map.

    Example:
        >>> viridis(0.0), viridis(1.0)
        ('#440154', '#fde725')
    """
    place = min(max(share, 0.0), 1.0) * (len(_VIRIDIS) - 1)
    below = min(int(place), len(_VIRIDIS) - 2)
    low, high = _VIRIDIS[below], _VIRIDIS[below + 1]
    mixed = [round(a + (place - below) * (b - a)) for a, b in zip(low, high, strict=True)]
    return "#{:02x}{:02x}{:02x}".format(*mixed)


@dataclass(frozen=True, slots=True)
class Scale:
    """Where a value lies between the ends; by logarithms where ``log``."""

    low: float
    high: float
    log: bool

    def at(self, value: float) -> float:
        """From 0 to 1."""
        low, high, x = self.low, self.high, value
        if self.log:
            low, high, x = math.log(low), math.log(high), math.log(max(x, low))
        return (x - low) / (high - low) if high > low else 0.5


def scale_of(values: Sequence[float]) -> Scale | None:
    """From the least to the most; logarithmic where the most is 20 times a positive least.

    Example:
        >>> scale_of([1.0, 100.0, math.nan])
        Scale(low=1.0, high=100.0, log=True)
    """
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return None
    low, high = min(known), max(known)
    return Scale(low, high, log=low > 0 and high > _LOG * low)


def heat_map(
    rows: Sequence[Sequence[float]],
    *,
    names: Sequence[str],
    columns: Sequence[str],
    scale: Scale,
    label: str,
    row_word: str,
) -> Markup:
    """One rectangle for each number, the first row at the top, each with a tooltip.

    ``names`` are of rows, ``columns`` words for the columns. A number that is not finite is grey.
    """
    height = min(max(180 / len(rows), 4.0), 20.0)
    width = _ACROSS / len(columns)
    cells = []
    for r, row in enumerate(rows):
        y = r * height
        for c, value in enumerate(row):
            finite = math.isfinite(value)
            fill = viridis(scale.at(value)) if finite else "var(--missing)"
            # A little wider than its column, so that no seam shows between two.
            wide = f"{width + 0.3:.1f}"
            path = f"M{_LEFT + c * width:.1f} {y:.1f}h{wide}v{height:.1f}h-{wide}z"
            told = three(value) if finite or math.isinf(value) else "not finite or not measured"
            title = f"{row_word} {names[r]}, {columns[c]}: {told}"
            cell = Markup('<path fill="{}" d="{}"><title>{}</title></path>')
            cells.append(cell.format(fill, path, title))
    bottom = len(rows) * height
    parts = [*cells, *_row_names(names, height, row_word), *_ends(columns, bottom)]
    parts += _legend(scale, bottom + 30)
    return _drawing(parts, bottom + 52, label)


def _row_names(names: Sequence[str], height: float, word: str) -> list[Markup]:
    every = math.ceil(len(names) / min(_MOST_ROWS, max(1, int(len(names) * height / 12))))
    found = []
    for i in range(0, len(names), every):
        words = f"{word} {names[i]}" if i == 0 else names[i]
        found.append(_text(_LEFT - 6, (i + 0.5) * height + 4, words, "end"))
    return found


def _ends(columns: Sequence[str], y: float) -> list[Markup]:
    found = [_text(_LEFT, y + 15, columns[0], "start")]
    if len(columns) > 1:
        found.append(_text(_WIDTH - _RIGHT, y + 15, columns[-1], "end"))
    return found


def _legend(scale: Scale, y: float) -> list[Markup]:
    low, high = three(scale.low), three(scale.high)
    if low == high:
        return [_text(_LEFT, y + 9, f"{low} everywhere", "start")]
    start = _LEFT + len(low) * _LETTER + 8
    found = [_text(_LEFT, y + 9, low, "start")]
    for i in range(24):
        bar = Markup('<path fill="{}" d="M{} {}h6.3v10h-6.3z"/>')
        found.append(bar.format(viridis(i / 23), f"{start + 6 * i:.1f}", f"{y:.1f}"))
    words = f"{high}, logarithmic" if scale.log else high
    return [*found, _text(start + 24 * 6 + 8, y + 9, words, "start")]


@dataclass(frozen=True, slots=True)
class Mark:
    """Something at a step: the line it stands on, how bad it is, and the words for it."""

    at: float
    line: str
    severity: str
    title: str


def timeline(marks: Sequence[Mark], low: float, high: float, *, label: str) -> Markup:
    """A line for each kind, with a mark for everything that happened, over a linear axis."""
    lines = list(dict.fromkeys(mark.line for mark in marks))
    parts = []
    for i, name in enumerate(lines):
        y = 14 + i * 34
        parts.append(_text(_LEFT, y, name, "start"))
        stroke = '<line class="grid-line" x1="{}" x2="{}" y1="{}" y2="{}"/>'
        parts.append(Markup(stroke).format(_LEFT, _WIDTH - _RIGHT, y + 12, y + 12))
        for mark in marks:
            if mark.line == name:
                share = (mark.at - low) / (high - low) if high > low else 0.5
                circle = '<circle class="when {}" cx="{}" cy="{}" r="5"><title>{}</title></circle>'
                at = f"{_LEFT + share * _ACROSS:.1f}"
                parts.append(Markup(circle).format(mark.severity, at, y + 12, mark.title))
    bottom = len(lines) * 34 + 8
    parts += _ends([f"step {low:,.0f}", f"step {high:,.0f}"][: 1 + (high > low)], bottom)
    return _drawing(parts, bottom + 20, label)


def _text(x: float, y: float, words: str, anchor: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(
        f"{x:.1f}", f"{y:.1f}", anchor, words
    )


def _drawing(parts: Sequence[Markup], height: float, label: str) -> Markup:
    return Markup(
        '<svg class="plot" viewBox="0 0 {} {:.0f}" role="img" aria-label="{}">{}</svg>'
    ).format(_WIDTH, height, label, Markup("").join(parts))
