"""The page of monitored runs: one file, well formed, and small whatever the run."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from headwise.monitoring.record import Run, StepRecord
from headwise.report.health_facts import health_of, verdict, when_the_loss_shows
from headwise.report.health_page import health_page
from headwise.report.health_plots import figure_plots, loss_plot, map_plots, thinned, timeline_plot
from headwise.report.heat_map import Scale, heat_map, scale_of, viridis
from tests.report.health_runs import failing, record, run
from tests.report.test_cost_page import Page
from tests.report.test_line_plot import all_inside

EMPTY = StepRecord(
    step=1, time=0.0, layers=(), stream={}, weights={}, non_finite="", values={}
)  # fmt: skip

RUNS = {
    "healthy": (run(),),
    "failing": (failing(),),
    "two": (failing(), run()),
    "three": (failing(), run(), run(name="other")),
    "one record": (run(1),),
    "one record beside a run": (run(1), run(name="other")),
    "one layer": (run(layers=1, heads=1),),
    "all NaN": (Run(Path("lost"), {}, tuple(record(s, logit=math.nan, loss=math.nan)
                                            for s in (1, 10))),),
    "nothing but steps": (Run(Path("bare"), {}, (EMPTY, replace(EMPTY, step=7))),),
    "same name": (run(), replace(run(), folder=Path("b/made-up"))),
    "odd name": (run(name="a<b&\"c"),),
}  # fmt: skip


@pytest.mark.parametrize("runs", RUNS.values(), ids=RUNS)
def test_every_page_is_whole_and_loads_nothing(runs):
    page = health_page(*runs)
    Page(page)
    assert page.lstrip().startswith("<!doctype html>")
    assert "<script" not in page
    assert re.findall(r"(?:src|href)=\"(?!data:)", page) == []
    assert not re.search(r"(?:[\" ,]|>)(?:nan|inf|None)(?:[\" ,]|<)", page)


def test_every_drawing_stays_inside():
    runs = [health_of(each) for each in (failing(), run())]
    drawn = (loss_plot(runs), timeline_plot(runs[0]), *figure_plots(runs), *map_plots(runs))
    assert len(drawn) == 2 + 6 + 2 * 4
    for plot in drawn:
        all_inside(ElementTree.fromstring(str(plot.drawing)))


def test_a_large_run_makes_a_small_page():
    large = run(200, layers=30, heads=9)
    page = health_page(large)
    assert len(page) < 1_000_000
    assert "200 records in 66 columns, the largest of each" in page


def test_numbers_of_the_map_are_those_of_the_run():
    found = health_of(run(3, layers=2, heads=2))
    titles = re.findall(r"<title>(.*?)</title>", map_plots([found])[0].drawing)
    assert titles == [
        "layer 0, step 1: 7.01", "layer 0, step 10: 7.02", "layer 0, step 20: 7.03",
        "layer 1, step 1: 7.11", "layer 1, step 10: 7.12", "layer 1, step 20: 7.13",
    ]  # fmt: skip


def test_two_runs_share_the_colours_of_a_map():
    low, high = (health_of(run(3, name=str(i), layers=1, heads=1)) for i in range(2))
    high.tables["max_logit"].values[:] = 700.0
    first, second = map_plots([low, high])[:2]
    assert first.caption.startswith("0: max logit")
    assert viridis(1.0) in second.drawing.split("<text")[0]
    assert viridis(1.0) not in first.drawing.split("<text")[0]


def test_a_map_marks_what_is_not_finite_grey():
    drawn = heat_map(
        [[1.0, math.nan]], names=["0"], columns=["step 1", "step 2"], scale=Scale(1.0, 1.0, False),
        label="a map", row_word="layer",
    )  # fmt: skip
    assert drawn.count("var(--missing)") == 1
    assert "layer 0, step 2: not finite or not measured" in drawn


def test_colours_are_of_logarithms_where_values_span_far():
    assert scale_of([2.0, 40.1]).log
    assert not scale_of([2.0, 40.0]).log
    assert not scale_of([-2.0, 400.0]).log
    assert scale_of([math.nan]) is None


def test_thinning_keeps_the_worst_of_each_span():
    steps = list(range(1, 11))
    values = np.array([1.0, 9.0, 1.0, 1.0, 1.0, np.nan, np.nan, 4.0, -3.0, 2.0])
    spans, most = thinned(steps, values, 5, "most")
    assert spans == [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10)]
    assert most.tolist() == [9.0, 1.0, 1.0, 4.0, 2.0]
    least = thinned(steps, values, 5, "least")[1]
    assert least.tolist() == [1.0, 1.0, 1.0, 4.0, -3.0]
    assert math.isnan(thinned([1, 2], np.array([np.nan, np.nan]), 1, "most")[1][0])


def test_alarms_stand_on_the_timeline_the_loss_and_in_the_list():
    found = health_of(failing())
    kinds = {alarm.kind for alarm in found.alarms}
    assert {"max_logit_100", "max_logit_1000", "non_finite"} <= kinds
    drawn = timeline_plot(found).drawing
    assert drawn.count("<circle") == len(found.alarms)
    assert loss_plot([found]).drawing.count('class="threshold"') >= 2
    page = health_page(failing())
    for alarm in found.alarms:
        assert alarm.title in page
    assert "arXiv:2309.14322" in page
    assert "qk_clip" in page


def test_curves_are_by_layer_or_of_the_ends_or_one_for_each_run():
    def names(*runs):
        first = figure_plots([health_of(each) for each in runs])[0].drawing
        texts = ElementTree.fromstring(str(first)).iter("text")
        return [text.text for text in texts if " " in text.text or ":" in text.text]

    assert names(run(layers=2)) == ["layer 0", "layer 1"]
    ends = ["largest of layers", "median of layers", "smallest of layers"]
    assert names(run(layers=7)) == ends
    assert names(run(name="a"), run(name="b")) == ["a: largest of layers", "b: largest of layers"]


def test_a_healthy_run_has_no_alarm_and_no_list():
    found = health_of(run())
    assert verdict(found) == "No alarm."
    assert timeline_plot(found) is None
    assert 'class="findings"' not in health_page(run())


def test_the_verdict_counts_the_steps_before_the_loss():
    found = health_of(failing())
    # The median of three is 4.5 once two of them are: at the second record with the high loss.
    assert when_the_loss_shows(found) == 181
    first = next(alarm for alarm in found.alarms if alarm.severity != "note")
    assert f"the first at step {first.step:,}: {first.title}." in verdict(found)
    assert f"from step 181 on, {181 - first.step} steps later." in verdict(found)


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([5, 4, 3, 3, 3.5, 3.5], None),
        ([5, 4, 3, 3, 3, 3.7, 3.7], 7),
        ([5, 4, 3, 3, 3, 9, 3, 3], None),  # one spike is no rise
        ([5, 4, math.nan], 3),
        ([math.nan, math.nan], None),  # not logged
        ([-5, -4, -3], None),
    ],
)
def test_when_the_loss_shows(losses, step):
    records = [record(i + 1, loss=float(loss)) for i, loss in enumerate(losses)]
    assert when_the_loss_shows(health_of(Run(Path("a"), {}, tuple(records)))) == step


def test_records_that_were_overtaken_are_left_out_and_told():
    old = [record(step, loss=9.0, time=float(step)) for step in (1, 10, 20, 30)]
    new = [record(step, loss=3.0, time=100.0 + step) for step in (20,)]
    found = health_of(Run(Path("resumed"), {}, (*old[:3], *new, old[3])))
    assert found.steps == (1, 10, 20)
    assert found.loss.tolist() == [9.0, 9.0, 3.0]
    assert "2 records from before that are left out" in found.notes[0]


def test_a_cut_run_says_so():
    assert "not whole" in health_page(run(cut=True))
    assert "not whole" not in health_page(run())


def test_figures_of_blocks_are_norms_over_their_weights():
    weights = {
        "blocks.0.a.weight": {"gradient": 3.0, "weight": 3.0, "update": 0.3},
        "blocks.0.b.weight": {"gradient": 4.0, "weight": 4.0, "update": 0.4},
        "embedding.weight": {"gradient": 100.0, "weight": 1.0, "update": 1.0},
    }
    found = health_of(Run(Path("a"), {}, (replace(EMPTY, weights=weights),)))
    assert found.tables["gradient"].modules == ("blocks.0",)
    assert found.tables["gradient"].values.tolist() == [[5.0]]
    assert found.tables["update"].values[0, 0] == pytest.approx(0.1, rel=1e-15)


def test_encoder_decoder_layers_are_told_apart():
    made = record(1, layers=1)
    of = lambda module, role: replace(made.layers[0], module=module, role=role)  # noqa: E731
    layers = (of("encoder.blocks.0.a", "self"), of("decoder.blocks.0.a", "self"),
              of("decoder.blocks.0.c", "cross"))  # fmt: skip
    stream = {"encoder.blocks.0": {"rms": 1.0}, "decoder.blocks.0": {"rms": 2.0}}
    found = health_of(Run(Path("a"), {}, (replace(made, layers=layers, stream=stream),)))
    assert found.tables["max_logit"].layers == ("encoder 0", "decoder 0", "cross 0")
    assert found.tables["rms"].layers == ("encoder 0", "decoder 0")
