"""The page and the terminal of statements: every verdict, number and control in its place."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace

import pytest
from rich.console import Console

from headwise.report.theorem_facts import counts, measured_row, sentences
from headwise.report.theorem_page import theorem_page, views
from headwise.report.theorem_terminal import listed, theorem_summary
from headwise.theorems.checked import check_model, check_random
from headwise.theorems.measured import exact
from tests.report.test_cost_page import Page
from tests.theorems import made_up as m

STATEMENTS = (m.HOLDS, m.FAILS, m.OFTEN, m.OPEN, m.VIOLATED, m.BROKEN, m.TRAINED)


@pytest.fixture(scope="module")
def found():
    chosen = [("First subject", each) for each in STATEMENTS[:3]]
    chosen += [("Second: 1/√d_k", each) for each in STATEMENTS[3:]]
    return check_random(chosen)


@pytest.fixture(scope="module")
def text(found):
    return theorem_page(found, "What <the theory> says", ["seed 0", "quick"])


def plain(text):
    return " ".join(unescape(re.sub(r"<style.*?</style>|<[^>]*>", "", text, flags=re.S)).split())


# ------------------------------------------------------------------ the page


def test_the_page_is_whole_and_loads_nothing(text):
    Page(text)
    assert "<script" not in text
    assert re.findall(r'(?:src|href)="([^"#][^"]*)"', text) == ["data:,"]
    assert "http://www.w3.org" in text  # the names of MathML alone
    assert re.findall(r"https?://(?!www\.w3\.org)", text) == []
    assert "What &lt;the theory&gt; says" in text


def test_every_statement_is_in_the_contents(text):
    links = re.findall(r'<a href="#([^"]+)"', text)
    assert links == [each.name for each in STATEMENTS]
    assert re.findall(r'<article id="([^"]+)"', text) == links


def test_everything_of_a_statement_is_there(text):
    article = text.split('<article id="violated">')[1].split("</article>")[0]
    said = plain(article)
    for part in (
        "What <violated> says of dk", "The statement violated holds for WQK.",
        "ASSUMPTION-VIOLATED It is 1.03 at dk = 7. Condition that is not met: x is large.",
        "x is <small>", "y is not", "the mean of 17 draws (expectation)", "nobody 1906, section 3",
        "exercise 3", "“x is always 1” Rather: x is 1 on average", "Spread <of> it",
        "mean is 3.50 standard errors from its prediction.",
        "Control, a condition <dropped>: fails, as it must",
    ):  # fmt: skip
        assert part in said, part
    assert article.count("<math") == 2
    assert article.count("<svg") == 1


def test_the_table_of_measurements(text):
    tables = Page(text).tables
    rows = next(table for table in tables if table[-1][:3] == ["x − y", "0.530", "0"])
    assert rows[0] == ["", "measured", "predicted", "tolerance or error", "z", "draws", ""]
    assert max(len(table[0]) for table in tables) == 7
    of_it = next(table for table in tables if any("slope" in row for row in table))
    assert ["mean", "1.03", "1", "4 × 0.0100", "3.50", "17", "as predicted"] in of_it
    value = "-0.500 (-0.610 to -0.410)"
    slope = ["slope", value, "minus infinite to -0.300", "", "", "11", "as predicted"]
    assert slope in of_it
    assert ["x − y", "0.530", "0", "1.00e-9", "", "", "not as predicted"] in of_it


def test_verdicts_have_their_marks(found, text):
    marks = [each.mark for _, members in views(found) for each in members]
    assert marks == [
        "holds", "fails", "violated", "inconclusive", "violated", "broken", "inconclusive"
    ]  # fmt: skip
    styles = text.split("</style>")[0]
    assert all(word in styles for word in (".holds", ".violated", ".fails", ".broken"))


# ------------------------------------------------------------------ words


def test_counts_name_what_is_not_expected(found):
    assert counts(found) == (
        "7 statements: 1 HOLDS, 2 FAILS, 1 ASSUMPTION-VIOLATED, 2 INCONCLUSIVE, 1 CHECK-BROKEN."
        " Not as expected: fails, violated, broken."
    )
    assert counts(found[:1]) == "1 statement: 1 HOLDS. All as expected."


def test_sentences(found):
    told = {each.theorem.name: sentences(each) for each in found}
    assert told["often-claimed"][-1] == "That it fails is the result: the claim is often made."
    assert len(told["fails"]) == 1
    assert told["open"][1] == "Nothing can be said: too few."
    assert told["broken"][1] == "A control that must fail did not: one that cannot see."
    assert told["trained"] == ["It is a statement about trained models."]
    (alone,) = check_random([("x", m.theorem("y", lambda effort: m.evidence(controls=())))])
    assert sentences(alone)[1] == "A control that must fail did not: there is none."


def test_a_unit_stands_beside_its_number():
    assert measured_row(exact("x", 2.0, tolerance=1.0))[1] == "2"
    row = measured_row(m.estimate("x", 2.0, predicted=2.0, error=1.0, draws=3, unit="bits"))
    assert row[1] == "2 bits"
    assert row[-1] == "open"  # too few draws


# ------------------------------------------------------------------ the terminal


def printed(shown):
    console = Console(width=80, record=True, file=None, force_terminal=True)
    with console.capture() as capture:
        console.print(shown)
    return capture.get()


def bare(text):
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_the_terminal_has_eighty_columns(found):
    lines = bare(printed(theorem_summary(found, "On <nothing>", ["seed 0"]))).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].strip() == "On <nothing>"
    told = [line.split() for line in lines]
    assert ["violated", "ASSUMPTION-VIOLATED"] in told
    assert ["often-claimed", "FAILS"] in told
    at = {line.find("HOLDS") for line in lines if line.startswith("holds")}
    assert at == {line.find("FAILS") for line in lines if line.startswith("fails")}


def test_verdicts_have_colours(found):
    text = printed(theorem_summary(found, "x", []))
    assert "\x1b[32mHOLDS" in text
    assert "\x1b[1;31mFAILS" in text
    assert "\x1b[31mFAILS" in text  # the claim that is often made
    assert "\x1b[33mASSUMPTION-VIOLATED" in text


def test_markup_in_a_finding_is_text():
    odd = m.theorem("odd", lambda effort: m.evidence(finding="a [bold]range[/bold] [0.1, 0.2]"))
    assert "a [bold]range[/bold] [0.1, 0.2]" in bare(
        printed(theorem_summary(check_random([("[red]s", odd)]), "[red]x", ["[red]"]))
    ).replace("A ", "a ")


def test_names_are_listed():
    shown = bare(printed(listed([("Made up", m.HOLDS), ("Made up", m.FAILS)], [m.REPEATED])))
    words = " ".join(shown.split())
    assert words.startswith("Made up holds What <holds> says of d_k (exercise 3) fails")
    assert "Results of papers, for --reproduce nobody-1906" in words
    assert words.endswith("On trained models too: holds")


def test_a_model_is_named(found):
    checked = check_model([("s", m.OPEN)], SimpleNamespace(name="my model"))
    assert checked[0].outcome.where == "my model"
    assert sentences(checked[0]) == ["It has no heads."]
