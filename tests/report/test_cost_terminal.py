"""What a model costs in a terminal: no number is cut at any width that people use."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from headwise.cost.planner import cost
from headwise.observation.counted import Verified
from headwise.report.cost_facts import compared_rows, component_rows, utilisation_rows
from headwise.report.cost_terminal import compared, cost_summary, used, verified
from tests.cost.as_files import BIG
from tests.report.test_cost_page import MODELS


def printed(shown, width):
    out = io.StringIO()
    Console(file=out, width=width).print(shown)
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_whole_and_lines_fit(name, width):
    found = cost(MODELS[name], on="h100-sxm")
    text = printed(cost_summary(found), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text.replace("norms, …:", "")
    lines = text.splitlines()
    for label, stored, macs, _ in component_rows(found.forward):
        line = next(line for line in lines if line.startswith(f"{label} "))
        assert not stored or f" {stored:,} " in line
        assert not macs or re.search(r" [\d.,]+( [kMGTPE])? +[\d.,]+( [kMGTPE])? +[\d.]+%", line)
    assert f"{found.forward.macs:,} multiply-adds = {found.flops:,} FLOPs forward" in text
    firsts = [each.first for each in found.crossovers if each.first is not None]
    assert all(f" {first:,} " in text for first in firsts)
    assert " 1 layers" not in text
    assert "None" not in text


@pytest.mark.parametrize("width", [80, 200])
def test_words_are_not_broken(width):
    text = printed(cost_summary(cost(MODELS["trillion"], on="h100-sxm")), width)
    for word in ("scaled_dot_product_attention", "FlopCounterMode", "grouped_mm"):
        assert word in text


def test_a_narrow_terminal_gets_tables_below_each_other():
    several = [cost(BIG, length=n) for n in (2**k for k in range(7, 15))]
    names, rows = compared_rows(several)
    wide, narrow = (printed(compared(several), width) for width in (200, 80))
    assert wide.count("\nparameters ") == 1
    assert narrow.count("\nparameters ") > 1
    for text in (wide, narrow):
        for name, cells in rows:
            found = [
                line for line in text.splitlines() if re.match(rf"{re.escape(name)}(  |$)", line)
            ]
            shown = re.sub(r"\s+", " ", " ".join(line[len(name) :] for line in found)).strip()
            assert shown == " ".join(cells)
        assert text.count("the configuration") == len(names)
    assert max(map(len, narrow.splitlines())) <= 80


def test_predicted_beside_counted():
    right = Verified("GPT2LMHeadModel", 17, 3, 1009, 1009, 2003, 2003, 6007, 6007)
    text = printed(verified(right), 80)
    assert text.count("equal") == 3
    wrong = printed(verified(replace(right, counted_forward=1999)), 80)
    assert wrong.count("equal") == 2
    assert re.search(r"FLOPs forward +2,003 +1,999 +differs by -4\n", wrong)


def test_utilisation_has_three_conventions():
    found = cost(BIG, on="h100-sxm", recompute="full")
    text = printed(used(found, 10_007, 3), 80)
    shares = [row[2] for row in utilisation_rows(found, 10_007, 3)]
    assert shares[2] > shares[1]  # what is computed again is work of the machine alone
    assert all(f" {share} " in text for share in shares)
    assert "10,007 tokens/s" in " ".join(text.split())
