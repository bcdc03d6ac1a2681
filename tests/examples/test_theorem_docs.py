"""The pages of the statements are those that the program's own objects give.

What was measured differs in its last digits between machines, so it is left out of the comparison;
that it is there, and with which verdict, is not.
"""

from __future__ import annotations

import importlib.util
import re
import xml.etree.ElementTree as ET

import pytest

from headwise.theorems.checked import check_random
from headwise.theorems.registry import theorems
from tests.examples.blocks import ROOT
from tests.theorems import made_up

FOLDER = ROOT / "docs" / "explanation"


def script():
    spec = importlib.util.spec_from_file_location("docs", ROOT / "scripts/write_theorem_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docs():
    return script()


@pytest.mark.parametrize("name", ["theorems.md", *(f"theorems/{t.name}.md" for t in theorems())])
def test_pages_are_those_of_the_program(docs, name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert docs.without_measurements(text) == docs.pages()[name], (
        "run python scripts/write_theorem_docs.py"
    )


def test_there_are_no_other_pages(docs):
    pages = {path.name for path in (FOLDER / "theorems").glob("*.md")}
    assert pages == {f"{theorem.name}.md" for theorem in theorems()}


@pytest.mark.parametrize("theorem", theorems(), ids=lambda each: each.name)
def test_what_was_measured_is_there(theorem):
    text = (FOLDER / "theorems" / f"{theorem.name}.md").read_text(encoding="utf-8")
    measured = text.split("<!-- measured: begin -->")[1].split("<!-- measured: end -->")[0]
    (said,) = re.findall(r"^\*\*([A-Z-]+)\*\*", measured, re.MULTILINE)
    # Some need the draws of --full, some a trained model, to say anything.
    assert said in (theorem.expected, "INCONCLUSIVE")
    assert said == "INCONCLUSIVE" or "control, " in measured
    for name in re.findall(r"\]\(([^)]+\.svg)\)", measured):
        ET.parse(FOLDER / "theorems" / name)


def test_a_page_has_every_part(docs):
    (checked,) = check_random([("made up", made_up.VIOLATED)])
    text, drawn = docs.what_was_measured(checked)
    page = docs.page(made_up.VIOLATED, text)
    for part in (
        "# What <violated> says of d_k", "The statement violated holds", made_up.VIOLATED.latex,
        "- x is <small>", "Kind: expectation.", "Prediction: 1.",
        "**ASSUMPTION-VIOLATED** (quick, seed 0).", "| mean | 1.03 | 1 | 4 × 0.0100 | 3.50 | 17 |",
        "| control, a condition <dropped>: x − y | 0.530 |", "![Spread <of> it](violated-1.svg)",
        "- “x is always 1”\n  Rather: x is 1 on average.", "nobody 1906, section 3; exercise 3.",
        "`headwise theorems --only violated` runs it on random weights, `headwise theorems MODEL",
    ):  # fmt: skip
        assert part in page, part
    assert docs.without_measurements(page) == docs.page(made_up.VIOLATED, "")
    assert ET.fromstring(drawn["violated-1.svg"]).tag == "{http://www.w3.org/2000/svg}svg"


def test_a_page_that_was_changed_by_hand_is_noticed(docs):
    page = docs.page(made_up.HOLDS, "")
    assert docs.without_measurements(page.replace("x is <small>", "x is <large>")) != page
