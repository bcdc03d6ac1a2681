"""Curves and stacked shares as SVG: every number inside the drawing, and where the scale says."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest

from headwise.report.line_plot import Curve, Marker, curves, stacked

WIDTH, LETTER = 640, 6.4  # of the drawing, and of a letter of 11 px type
PLACES = [128, 256, 512, 1024, 2048]
LINES = [
    Curve("first", [3.0, 7.0, 31.0, 211.0, 5003.0]),
    Curve("second", [11.0, 11.0, None, 0, 13]),
]


def words(value: float) -> str:
    return f"{value:,.0f}"


def drawn(lines=LINES, places=PLACES, **more):
    options = {"label": "what it is", "across": "tokens", "words": words, "across_words": words}
    made = curves(places, lines, **{**options, **more})
    return ET.fromstring(str(made))


def shares(**more):
    parts = [Curve("a", [0.5, 0.25, 0.125]), Curve("b", [0.5, 0.75, 0.875])]
    made = stacked([7, 31, 211], parts, label="x", across="tokens", across_words=words, **more)
    return ET.fromstring(str(made))


def boxes(svg):
    """Left, right, baseline and text of every text, from the number of its letters."""
    for text in svg.iter("text"):
        x, y, wide = float(text.get("x")), float(text.get("y")), LETTER * len(text.text)
        left = {"start": x, "middle": x - wide / 2, "end": x - wide}[text.get("text-anchor")]
        yield left, left + wide, y, text.text


def all_inside(svg):
    _, _, width, height = map(float, svg.get("viewBox").split())
    for left, right, y, text in boxes(svg):
        assert 0 <= left < right <= width, text
        assert 8 <= y <= height, text


def test_a_dot_for_every_value_that_can_be_drawn():
    svg = drawn()
    dots = list(svg.iter("circle"))
    assert [len([d for d in dots if d.get("class") == f"dot s{i}"]) for i in (1, 2)] == [5, 3]
    assert [line.get("points").count(",") for line in svg.iter("polyline")] == [5, 3]
    titles = [title.text for title in svg.iter("title")]
    assert titles[:2] == ["first: 3 at 128", "first: 7 at 256"]
    assert titles[-1] == "second: 13 at 2,048"


def test_dots_stand_where_the_logarithms_say():
    dots = [d for d in drawn().iter("circle") if d.get("class") == "dot s1"]
    across = [float(dot.get("cx")) for dot in dots]
    steps = [b - a for a, b in pairwise(across)]
    assert max(steps) - min(steps) <= 0.1 + 1e-9  # two roundings to a tenth of a pixel
    up = [float(dot.get("cy")) for dot in dots]
    assert up == sorted(up, reverse=True)  # larger values stand higher


def test_lines_of_the_grid_are_powers_around_the_values():
    svg = drawn(ticks=10.0)
    heights = {text: y for _, _, y, text in boxes(svg)}
    assert [t for t in ("1", "10", "100", "1,000", "10,000") if t in heights] == [
        "1", "10", "100", "1,000", "10,000"
    ]  # fmt: skip
    gaps = [heights["1"] - heights["10"], heights["1,000"] - heights["10,000"]]
    assert gaps[0] == pytest.approx(gaps[1], abs=0.2)


def test_many_powers_leave_some_lines_out_but_no_room():
    svg = drawn([Curve("wide", [1.0, 1e5, 1e9, 1e14, 1e16])])
    lines = [line for line in svg.iter("line") if line.get("class") == "grid-line"]
    assert len(lines) <= 7
    top = min(float(dot.get("cy")) for dot in svg.iter("circle"))
    assert top == 22.0  # the largest value is a power, so it is the end of the axis


def test_dots_alone_and_words_of_their_own():
    svg = drawn(joined=1, titles={("second", 128): "the second of them"})
    assert len(list(svg.iter("polyline"))) == 1
    assert {d.get("class") for d in svg.iter("circle")} == {"dot s2"}
    assert next(svg.iter("title")).text == "the second of them: 11 at 128"


def test_lines_in_the_same_place_can_all_be_seen():
    same = [Curve(name, [2.0, 4.0, 8.0, 16.0, 32.0]) for name in ("a", "b", "c")]
    radii = [float(dot.get("r")) for dot in drawn(same).iter("circle")]
    assert radii[0] > radii[5] > radii[10]


def test_shares_fill_the_height():
    svg = shares()
    bands = [p.get("points").split() for p in svg.iter("polygon")]
    assert [len(points) for points in bands] == [6, 6]
    heights = [float(point.split(",")[1]) for point in bands[1][:3]]
    assert len(set(heights)) == 1  # the last one ends at 100 %
    titles = [title.text for title in svg.iter("title")]
    assert titles == [
        "a: 50.0% at 7", "a: 25.0% at 31", "a: 12.5% at 211",
        "b: 50.0% at 7", "b: 75.0% at 31", "b: 87.5% at 211",
    ]  # fmt: skip


@pytest.mark.parametrize("at", [7.0, 8.5, 100.0, 210.9, 211.0])
def test_markers_are_inside_with_their_labels(at):
    svg = shares(markers=[Marker(at, "= all linear layers"), Marker(20.0, "= MLP")])
    lines = [line for line in svg.iter("line") if line.get("class") == "threshold"]
    assert len(lines) == 2
    for line in lines:
        assert 80 <= float(line.get("x1")) <= WIDTH - 14
        assert line.get("x1") == line.get("x2")
    all_inside(svg)


def test_markers_beyond_the_axis_are_left_out():
    svg = shares(markers=[Marker(6.9, "before"), Marker(212.0, "after")])
    assert not [line for line in svg.iter("line") if line.get("class") == "threshold"]


def test_labels_are_inside_and_do_not_touch():
    places = [2**i for i in range(7, 31)]
    svg = drawn([Curve("x", [1.0 * p for p in places])], places, words=lambda v: f"{v:.0e}")
    all_inside(svg)
    below = sorted(box for box in boxes(svg) if box[2] == 278)
    assert len(below) > 3
    assert all(right < left for (_, right, _, _), (left, _, _, _) in pairwise(below))


def test_a_legend_of_many_names_takes_rows():
    lines = [Curve(f"the line that is number {i}", [2.0 + i] * 5) for i in range(5)]
    svg = drawn(lines)
    all_inside(svg)
    rows = {y for _, _, y, text in boxes(svg) if text.startswith("the line")}
    assert len(rows) > 1


def test_names_are_escaped():
    svg = drawn([Curve('<b>&"', [2.0] * 5)])
    assert any(text == '<b>&"' for _, _, _, text in boxes(svg))
    options = {"label": '"><script>', "across": "<i>", "words": words, "across_words": words}
    made = str(curves(PLACES, [Curve("<script>", [1.0] * 5)], **options))
    assert not re.search(r"<(script|i)>", made)


def test_nothing_to_draw_is_nothing():
    options = {"label": "x", "across": "y", "across_words": words}
    assert curves([5], [Curve("a", [1.0])], words=words, **options) == ""
    assert curves(PLACES, [Curve("a", [0, None, 0, 0, -1])], words=words, **options) == ""
    assert stacked([5], [Curve("a", [1.0])], **options) == ""


def test_one_value_everywhere_has_a_scale():
    dots = [float(dot.get("cy")) for dot in drawn([Curve("flat", [1000.0] * 5)]).iter("circle")]
    assert len(set(dots)) == 1
    assert 22 <= dots[0] <= 260
