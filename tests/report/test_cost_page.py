"""The page of what models cost: one file, every number in it, nothing beside its place."""

from __future__ import annotations

import json
import re
from html import unescape
from html.parser import HTMLParser

import pytest

from headwise.cost.explicit import explicit
from headwise.cost.planner import cost
from headwise.report.cost_page import cost_page, cost_sections
from headwise.report.cost_plots import plots, roofline_plot
from tests.cost.as_files import TINY, TRILLION, config
from tests.report.test_line_plot import all_inside, boxes

MODELS = {
    **{kind: config(kind) for kind in TINY},
    "trillion": TRILLION,
    "sizes": explicit(d_model=40, layers=3, heads=4, vocab=97),
    "one layer": explicit(d_model=4096, layers=1, heads=32, vocab=32_000),
    "encoder": explicit(d_model=40, layers=3, heads=4, vocab=97, causal=False),
    "window": explicit(d_model=40, layers=3, heads=4, vocab=97, window=5, context=8192),
}
FIXED = ("vit",)  # whose length is that of the picture


@pytest.fixture(scope="module")
def costs():
    return {name: cost(model, on="h100-sxm") for name, model in MODELS.items()}


class Page(HTMLParser):
    """Checks that tags are closed, and keeps the tables as rows of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables: list[list[list[str]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "link"):
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data


@pytest.mark.parametrize("name", MODELS)
def test_every_page_is_whole_and_loads_nothing(costs, name):
    text = cost_page([costs[name]])
    page = Page(text)
    assert "<script" not in text
    assert not re.search(r"(?:src|href)=\"(?!data:)", text)
    assert not re.search(r"url\(|@import|https?://", text)
    for table in page.tables:
        assert len({len(row) for row in table}) == 1, table[0]
    words = unescape(re.sub(r"<[^>]+>", "", text))
    found = costs[name]
    for number in (found.parameters, found.flops, found.training_flops, found.inference.total):
        assert f"{number:,}" in words
    assert "nan" not in words.lower().split()
    assert "None" not in words


@pytest.mark.parametrize("name", MODELS)
def test_the_rows_of_components_add_up(costs, name):
    table = Page(cost_page([costs[name]])).tables[0]
    end = next(i for i, row in enumerate(table) if row[0] == "total")

    def sums(column):
        return sum(int(row[column].replace(",", "") or 0) for row in table[1:end])

    total = [int(table[end][column].replace(",", "")) for column in (1, 3, 4, 6)]
    assert [sums(1), sums(3), sums(4), sums(6)] == total


@pytest.mark.parametrize("name", MODELS)
def test_plots_have_every_point_inside(costs, name):
    import xml.etree.ElementTree as ET

    found = plots(costs[name])
    if name in FIXED:
        assert found == []
    drawings = [ET.fromstring(str(plot.drawing)) for plot in found]
    roof = roofline_plot(costs[name])
    assert roof is not None
    for svg in [*drawings, ET.fromstring(str(roof.drawing))]:
        all_inside(svg)
        for dot in svg.iter("circle"):
            assert 80 <= float(dot.get("cx")) <= 626
            assert 22 <= float(dot.get("cy")) <= 260
            assert dot.find("title").text
    for svg in drawings[1:]:
        lengths = {title.text.rsplit(" at ", 1)[1] for title in svg.iter("title")}
        legend = {text for _, _, y, text in boxes(svg) if y > 300}
        names = {title.text.split(": ")[0] for title in svg.iter("title")}
        assert names == legend
        assert len(list(svg.iter("circle"))) == len(lengths) * len(names)


def test_crossovers_are_marked_in_the_shares(costs):
    shares = str(plots(costs["one layer"])[0].drawing)
    assert shares.count('class="threshold"') == 2
    assert "= all linear layers" in shares
    pair = plots(costs["t5"])[0]  # shares of both stacks, in which no such length is to be seen
    assert "threshold" not in pair.drawing
    assert "dashed" not in pair.caption


def test_windows_move_the_crossovers():
    found = cost(MODELS["window"], pairs="visible", length=8192)
    every = plots(cost(MODELS["window"], length=8192))[0]
    assert "the pairs that the mask shows" in plots(found)[0].caption
    assert str(every.drawing) != str(plots(found)[0].drawing)


def test_every_component_of_a_pass_is_in_the_roofline(costs):
    drawing = str(roofline_plot(costs["gpt2"]).drawing)
    for label in ("Q projection", "MLP", "A V", "unembedding"):
        assert re.search(rf"<title>[^<]*{label}[^<]*, training step: ", drawing)


@pytest.mark.parametrize("odd", ['<b>&"', "<script>alert(1)</script>"])
def test_names_are_escaped(tmp_path, odd):
    folder = tmp_path / odd.replace("/", "∕")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config("gpt2")), encoding="utf-8")
    found = cost(folder)
    for page in (cost_page([found]), cost_page([found, found])):
        Page(page)
        assert "<b>" not in page
        assert "<script" not in page
        assert f"cost of {folder.name}" in unescape(page) or "cost of 2 plans" in page


def test_a_comparison_has_a_column_for_each_and_then_each_in_full(costs):
    chosen = [costs["gpt2"], cost(config("gpt2"), length=7, on="h100-sxm"), costs["vit"]]
    text = cost_page(chosen)
    page = Page(text)
    first = page.tables[0]
    assert {len(row) for row in first} == {1 + len(chosen)}
    assert [row[0] for row in first][1:3] == ["tokens", "parameters"]
    assert first[1][1:] == ["1 × 61", "1 × 7", "1 × 10"]
    assert text.count("<h2>Arithmetic</h2>") == len(chosen)
    assert "the configuration, 1 × 7 tokens</h2>" in text


def test_sections_that_have_nothing_to_say_are_left_out():
    plain = [section.title for section in cost_sections(cost(config("gpt2")))]
    assert "Time" not in plain
    assert "What fits" not in plain
    timed = [s.title for s in cost_sections(cost(config("gpt2"), on="h100-sxm"))]
    assert {"Time", "What fits"} <= set(timed)


def test_a_change_of_the_model_changes_its_rows_and_no_others():
    """Twice the expansion factor: the MLP, and what sums over it."""

    def rows(d_ff):
        parts = explicit(d_model=40, layers=3, heads=4, vocab=97, d_ff=d_ff)
        return {row[0]: row for row in Page(cost_page([cost(parts, length=17)])).tables[0]}

    single, double = rows(53), rows(106)
    counts = (1, 3, 4, 6)  # the other columns are shares of the sums
    changed = {
        name
        for name, row in single.items()
        if [row[i] for i in counts] != [double[name][i] for i in counts]
    }
    assert changed == {"MLP", "total", "without the tables"}
    for i in counts:
        assert 2 * int(single["MLP"][i].replace(",", "")) == int(double["MLP"][i].replace(",", ""))
