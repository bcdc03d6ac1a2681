"""A drawing of curves or of stacked shares as SVG, made once: no script is needed to see it.

Axes are logarithmic unless told otherwise: lengths run over powers of two. Every point carries a
tooltip with its numbers; a value with a standard error has a bar of one error up and one down.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup, escape

__all__ = ["Curve", "Marker", "Plot", "curves", "round_ticks", "stacked"]

_WIDTH: Final = 640
_HEIGHT: Final = 300
_LEFT: Final = 80
_RIGHT: Final = 14
_TOP: Final = 22
_BOTTOM: Final = 40
_LEGEND_ROW: Final = 18
_LETTER: Final = 6.4  # pixels, of 11 px type

Words = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named line: its values at the places of the drawing; None leaves a gap.

    ``errors`` are standard errors, one for each value, or none at all.
    """

    name: str
    values: Sequence[float | None]
    errors: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawing and the words above it."""

    caption: str
    drawing: Markup


@dataclass(frozen=True, slots=True)
class Marker:
    """A vertical line at a place of the horizontal axis, with a word beside it."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class _Scale:
    """From numbers to pixels, linear or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def at(self, value: float) -> float:
        low, high, x = self.low, self.high, value
        if self.log:
            low, high, x = math.log(low), math.log(high), math.log(x)
        share = (x - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


@dataclass(frozen=True, slots=True)
class _Point:
    place: float
    value: float
    error: float

    def ends(self, log: bool) -> tuple[float, float]:
        """One standard error down and up; on a logarithmic axis a bar ends above zero."""
        low = self.value - self.error
        return (self.value / 10 if log and low <= 0 else low, self.value + self.error)


def _points(places: Sequence[float], line: Curve, log: tuple[bool, bool]) -> list[_Point]:
    errors = line.errors or [0.0] * len(places)
    return [
        _Point(place, value, error if math.isfinite(error) else 0.0)
        for place, value, error in zip(places, line.values, errors, strict=True)
        if value is not None and math.isfinite(value)
        and not (log[0] and place <= 0) and not (log[1] and value <= 0)
    ]  # fmt: skip


def curves(
    places: Sequence[float],
    lines: Sequence[Curve],
    *,
    label: str,
    across: str,
    words: Words,
    across_words: Words,
    markers: Sequence[Marker] = (),
    joined: int | None = None,
    titles: Mapping[tuple[str, float], str] | None = None,
    ticks: float = 10.0,
    across_ticks: Sequence[float] | None = None,
    log: tuple[bool, bool] = (True, True),
    linked: bool = False,
) -> Markup:
    """Curves over axes that are logarithmic where ``log`` (across, up) says so.

    On a logarithmic axis values of 0 or less are left out. Lines of the grid stand at powers of
    ``ticks`` or at round numbers, labels below at ``across_ticks`` (None: places).

    The first ``joined`` of them (None: all) are lines, the others dots alone, or dots on a faint
    line where they are ``linked``. ``titles`` are words for the dots by name and place, in place of
    their numbers.
    """
    drawn = [_points(places, line, log) for line in lines]
    shown = [end for points in drawn for point in points for end in point.ends(log[1])]
    if not shown or len(places) < 2:
        return Markup("")
    if log[1]:
        marks, high = _log_ticks(min(shown), max(shown), ticks)
    else:
        marks = round_ticks(min(shown), max(shown))
        high = marks[-1]
    x, y = _axes(places, marks[0], high, log=log[1], log_across=log[0])
    parts = [_grid(x, y, marks, words), _across(x, across_ticks or places, across_words)]
    parts += _markers(x, markers)
    for i, (line, points) in enumerate(zip(lines, drawn, strict=True)):
        path = " ".join(f"{x.at(p.place):.1f},{y.at(p.value):.1f}" for p in points)
        solid = joined is None or i < joined
        if solid or linked:
            kind = "series" if solid else "series link"
            line_drawn = Markup('<polyline class="{} s{}" points="{}"/>')
            parts.append(line_drawn.format(kind, i + 1, path))
        for point in points if joined is None or i >= joined else ():
            at = across_words(point.place)
            name = (titles or {}).get((line.name, point.place), line.name)
            title = f"{name}: {words(point.value)} at {at}"
            if point.error:
                title = f"{name}: {words(point.value)} ± {words(point.error)} at {at}"
                parts.append(_bar(i, x.at(point.place), *(y.at(e) for e in point.ends(log[1]))))
            parts.append(_dot(i, len(lines), x.at(point.place), y.at(point.value), title))
    return _drawing(parts, label, across, [line.name for line in lines])


def stacked(
    places: Sequence[float],
    lines: Sequence[Curve],
    *,
    label: str,
    across: str,
    across_words: Words,
    markers: Sequence[Marker] = (),
) -> Markup:
    """Shares that add up to one at every place, as bands on top of each other."""
    if len(places) < 2:
        return Markup("")
    x, y = _axes(places, 0.0, 1.0, log=False)
    percent: Words = lambda share: f"{share:.0%}"  # noqa: E731
    parts = [_across(x, places, across_words)]
    below = [0.0] * len(places)
    for i, line in enumerate(lines):
        above = [b + (v or 0.0) for b, v in zip(below, line.values, strict=True)]
        upper = [f"{x.at(p):.1f},{y.at(v):.1f}" for p, v in zip(places, above, strict=True)]
        lower = [f"{x.at(p):.1f},{y.at(v):.1f}" for p, v in zip(places, below, strict=True)]
        path = " ".join([*upper, *reversed(lower)])
        parts.append(Markup('<polygon class="band s{}" points="{}"/>').format(i + 1, path))
        for p, v, b, a in zip(places, line.values, below, above, strict=True):
            title = f"{line.name}: {v or 0.0:.1%} at {across_words(p)}"
            parts.append(_hot(x.at(p), y.at(a), y.at(b), (x.end - x.start) / len(places), title))
        below = above
    parts += [_grid(x, y, [0.0, 0.25, 0.5, 0.75, 1.0], percent), *_markers(x, markers)]
    return _drawing(parts, label, across, [line.name for line in lines])


def _axes(
    places: Sequence[float], low: float, high: float, *, log: bool, log_across: bool = True
) -> tuple[_Scale, _Scale]:
    used = [place for place in places if place > 0 or not log_across]
    x = _Scale(min(used), max(used), _LEFT, _WIDTH - _RIGHT, log=log_across)
    return x, _Scale(low, high, _HEIGHT - _BOTTOM, _TOP, log=log)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten that hold both ends, about ``most`` of them.

    Example:
        >>> round_ticks(0.0, 0.93), round_ticks(-3.0, 12.0)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [-5.0, 0.0, 5.0, 10.0, 15.0])
    """
    if high <= low:
        spread = abs(low) / 2 or 1.0
        low, high = low - spread, high + spread
    rough = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.12g}") for i in range(first, last + 1)]


def _log_ticks(low: float, high: float, base: float) -> tuple[list[float], float]:
    """Powers of the base around what is shown, seven at most; and where the axis ends."""
    first, last = math.floor(math.log(low, base) + 1e-9), math.ceil(math.log(high, base) - 1e-9)
    last = max(last, first + 1)
    step = math.ceil((last - first) / 6)
    return [base**power for power in range(first, last + 1, step)], base**last


def _grid(x: _Scale, y: _Scale, ticks: Sequence[float], words: Words) -> Markup:
    lines = []
    for tick in ticks:
        at = f"{y.at(tick):.1f}"
        lines.append(
            Markup('<line class="grid-line" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                x.start, x.end, at, at
            )
        )
        lines.append(_text(x.start - 6, y.at(tick) + 4, words(tick), "end"))
    return Markup("").join(lines)


def _across(x: _Scale, places: Sequence[float], words: Words) -> Markup:
    """Labels below, as many as do not touch."""
    parts, free = [], -math.inf
    for place in places:
        if not x.low <= place <= x.high:
            continue
        at, label = x.at(place), words(place)
        half = len(label) * _LETTER / 2
        if at - half > free and at + half <= _WIDTH:
            parts.append(_text(at, _HEIGHT - _BOTTOM + 18, label, "middle"))
            free = at + half + 8
    return Markup("").join(parts)


def _markers(x: _Scale, markers: Sequence[Marker]) -> list[Markup]:
    """Lines from top to bottom; labels in two rows so that neighbours can be read."""
    parts = []
    inside = [m for m in markers if x.low <= m.at <= x.high]
    for i, marker in enumerate(sorted(inside, key=lambda each: each.at)):
        at = x.at(marker.at)
        parts.append(
            Markup('<line class="threshold" x1="{}" x2="{}" y1="{}" y2="{}"/>').format(
                f"{at:.1f}", f"{at:.1f}", _TOP, _HEIGHT - _BOTTOM
            )
        )
        end = at + len(marker.label) * _LETTER > _WIDTH - _RIGHT
        anchor, shift = ("end", -4) if end else ("start", 4)
        parts.append(_text(at + shift, _TOP + 12 + 13 * (i % 3), marker.label, anchor, "halo"))
    return parts


def _text(x: float, y: float, words: str, anchor: str, style: str = "") -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}" class="{}">{}</text>').format(
        f"{x:.1f}", f"{y:.1f}", anchor, style, words
    )


def _dot(i: int, of: int, x: float, y: float, title: str) -> Markup:
    """Earlier ones are larger, so that a later one in the same place leaves a ring of them."""
    circle = Markup('<circle class="dot s{}" cx="{}" cy="{}" r="{}"><title>{}</title></circle>')
    return circle.format(i + 1, f"{x:.1f}", f"{y:.1f}", f"{2.6 + 0.8 * (of - 1 - i):.1f}", title)


def _bar(i: int, x: float, low: float, high: float) -> Markup:
    """A standard error up and down, with a foot at each end."""
    path = f"M{x:.1f},{low:.1f}V{high:.1f}M{x - 3:.1f},{low:.1f}h6M{x - 3:.1f},{high:.1f}h6"
    return Markup('<path class="error s{}" d="{}"/>').format(i + 1, path)


def _hot(x: float, top: float, bottom: float, width: float, title: str) -> Markup:
    return Markup(
        '<rect class="hot" x="{}" y="{}" width="{}" height="{}"><title>{}</title></rect>'
    ).format(
        f"{x - width / 2:.1f}", f"{top:.1f}", f"{width:.1f}", f"{max(bottom - top, 0):.1f}", title
    )


def _drawing(parts: Sequence[Markup], label: str, across: str, names: Sequence[str]) -> Markup:
    legend, x, y = [], float(_LEFT), float(_HEIGHT + 14)
    for i, name in enumerate(names):
        width = 20 + len(name) * _LETTER + 14
        if x + width > _WIDTH and x > _LEFT:
            x, y = float(_LEFT), y + _LEGEND_ROW
        legend.append(
            Markup('<rect class="key s{}" x="{}" y="{}" width="12" height="8"/>').format(
                i + 1, f"{x:.1f}", f"{y - 8:.1f}"
            )
        )
        legend.append(_text(x + 17, y, name, "start"))
        x += width
    inside = Markup("").join([*parts, _text((_LEFT + _WIDTH) / 2, _HEIGHT - 6, across, "middle")])
    size = f"0 0 {_WIDTH} {y + 10:.0f}"
    return Markup(
        '<svg class="plot" viewBox="{}" role="img" aria-label="{}">{}{}</svg>'
    ).format(size, escape(label), inside, Markup("").join(legend))  # fmt: skip
