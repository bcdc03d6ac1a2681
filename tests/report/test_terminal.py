"""The terminal summary fits 80 columns and says the same as the page."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from headwise.report.findings import findings, verdict
from headwise.report.terminal import summary
from headwise.results.label import to_dataset
from tests.results.conftest import SHAPES
from tests.results.synthetic import make_record


def printed(dataset, width=80):
    out = io.StringIO()
    Console(width=width, file=out, color_system=None).print(summary(dataset, findings(dataset)))
    return out.getvalue()


@pytest.mark.parametrize("shape", list(SHAPES))
def test_fits(shape):
    text = printed(to_dataset(make_record(**SHAPES[shape])))
    assert all(cell_len(line.rstrip()) <= 80 for line in text.splitlines())
    assert "entropy" in text


def test_says_the_verdict_and_where():
    dataset = to_dataset(make_record(5, 3, 37, nan_layer=1))
    text = " ".join(printed(dataset).split())
    assert verdict(findings(dataset)) in text
    assert "act NaN or infinity in 1 of 5 layers: L1." in text
    assert "·" in next(line for line in printed(dataset).splitlines() if "max logit" in line)


def test_a_narrow_terminal_shortens_the_bars_and_not_the_numbers():
    dataset = to_dataset(make_record(30, 2, 11))
    wide, narrow = (
        next(line for line in printed(dataset, width).splitlines() if line.startswith("sink "))
        for width in (80, 60)
    )
    assert "…" not in printed(dataset, 60)
    assert cell_len(narrow.rstrip()) <= 60
    assert narrow.split()[-4:] == wide.split()[-4:]


def test_many_layers_share_bars():
    lines = printed(to_dataset(make_record(80, 1, 11))).splitlines()
    bars = next(line for line in lines if line.startswith("sink "))
    assert sum(bars.count(bar) for bar in "▁▂▃▄▅▆▇█") == 36
