"""Plots of predictions and measurements: linear axes, error bars, what is a line and what dots."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from headwise.report.line_plot import Curve, curves, round_ticks
from headwise.report.theorem_plots import drawing
from headwise.theorems import statement
from tests.report.test_line_plot import all_inside
from tests.theorems.made_up import PLOT


def words(value):
    return f"{value:g}"


def drawn(lines, places=(1.0, 2.0, 4.0), log=(False, False), **more):
    made = curves(
        places, lines, label="x", across="y", words=words, across_words=words, log=log, **more
    )
    return ET.fromstring(str(made))


def of(svg, tag, kind):
    return [each for each in svg.iter(tag) if each.get("class") == kind]


def test_linear_axes():
    svg = drawn([Curve("x", [-1.0, 0.0, 2.0])])
    dots = of(svg, "circle", "dot s1")
    across = [float(dot.get("cx")) for dot in dots]
    assert across[2] - across[1] == pytest.approx(2 * (across[1] - across[0]), abs=0.2)
    up = [float(dot.get("cy")) for dot in dots]
    assert up[1] - up[2] == pytest.approx(2 * (up[0] - up[1]), abs=0.2)
    assert len(dots) == 3  # zero and less are drawn


def test_bars_are_one_error_up_and_one_down():
    svg = drawn([Curve("x", [1.0, 1.0, 1.0], [0.5, 0.0, 1.0])])
    bars = of(svg, "path", "error s1")
    assert len(bars) == 2
    spans = []
    for bar in bars:
        low, high = (float(part.split("M")[0].split(",")[-1]) for part in
                     (bar.get("d")[1:].split("V")[0], bar.get("d").split("V")[1]))  # fmt: skip
        spans.append(low - high)
    assert spans[1] == pytest.approx(2 * spans[0], abs=0.3)
    titles = [title.text for title in svg.iter("title")]
    assert titles == ["x: 1 ± 0.5 at 1", "x: 1 at 2", "x: 1 ± 1 at 4"]


def test_a_bar_below_zero_ends_inside_a_logarithmic_axis():
    svg = drawn([Curve("x", [1.0, 2.0, 1.0], [0.5, 3.0, 0.5])], log=(True, True))
    for bar in of(svg, "path", "error s1"):
        assert float(bar.get("d").split("V")[1].split("M")[0]) >= 22
        assert float(bar.get("d").split(",")[1].split("V")[0]) <= 260


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_what_is_no_number_is_left_out(bad):
    svg = drawn([Curve("x", [1.0, bad, 2.0], [0.1, math.nan, math.nan])])
    assert len(of(svg, "circle", "dot s1")) == 2
    assert len(of(svg, "path", "error s1")) == 1


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_a_constant_has_an_axis(value):
    all_inside(drawn([Curve("x", [value] * 3)]))


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (-3.1, 12.0), (0.97, 1.03), (1e-9, 3e-9), (0.0, 7e6)]
)
def test_ticks_are_round_and_hold_both_ends(low, high):
    ticks = round_ticks(low, high)
    assert ticks[0] <= low
    assert high <= ticks[-1]
    assert 3 <= len(ticks) <= 8
    step = ticks[1] - ticks[0]
    assert f"{step:.0e}"[0] in "125"


def test_predictions_are_lines_and_the_rest_dots_on_faint_ones():
    svg = ET.fromstring(str(drawing(PLOT)))
    assert len(of(svg, "polyline", "series s1")) == 1
    assert of(svg, "circle", "dot s1") == []
    assert len(of(svg, "circle", "dot s2")) == 2
    assert len(of(svg, "path", "error s2")) == 2
    assert len(of(svg, "circle", "dot s3")) == 3
    assert len(of(svg, "polyline", "series link s2")) == 1
    assert svg.get("aria-label") == "Spread <of> it: spread by width d_k"


@pytest.mark.parametrize(
    ("names", "lines"),
    [(("√d_k", "q·k"), 1), (("q·k", "bound of it"), 1), (("q·k", "k·q"), 1)],
)
def test_a_curve_without_errors_before_others_with_them_is_the_theory(names, lines):
    several = (
        statement.Curve(names[0], (1.0, 2.0), (0.1, 0.1) if "bound" in names[1] else ()),
        statement.Curve(names[1], (1.0, 2.0), () if "bound" in names[1] else (0.1, 0.1)),
    )
    svg = ET.fromstring(str(drawing(replace(PLOT, places=(1.0, 2.0), curves=several))))
    assert len(of(svg, "polyline", "series s1")) == lines


def test_without_errors_and_names_everything_has_dots():
    several = tuple(statement.Curve(name, (1.0, 2.0)) for name in ("sinusoids", "random"))
    svg = ET.fromstring(str(drawing(replace(PLOT, places=(1.0, 2.0), curves=several))))
    assert len(of(svg, "circle", "dot s1")) == len(of(svg, "circle", "dot s2")) == 2


@pytest.mark.parametrize("log", [(a, b) for a in (False, True) for b in (False, True)])
def test_places_in_any_order(log):
    turned = replace(
        PLOT,
        log=log,
        places=PLOT.places[::-1],
        curves=tuple(statement.Curve(c.name, c.values[::-1], c.errors[::-1]) for c in PLOT.curves),
    )
    assert drawing(turned) == drawing(replace(PLOT, log=log))
    all_inside(ET.fromstring(str(drawing(turned))))
