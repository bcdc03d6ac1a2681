"""The outcomes of checks as facts of a scan, and the section of the page that shows them."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from headwise.report.page import render
from headwise.report.theorem_section import theorem_section
from headwise.results.label import to_dataset
from headwise.results.validate import about
from headwise.theorems import reported
from headwise.theorems.registry import theorems
from headwise.theorems.reported import add_theorems
from tests.results.synthetic import make_record
from tests.theorems import made_up as m


@pytest.fixture
def scanned(monkeypatch):
    m.catalogue(monkeypatch, m.HOLDS, m.FAILS, m.TRAINED, others=(m.VIOLATED,))
    return to_dataset(make_record(layers=2, heads=3, tokens=37))


MODEL = SimpleNamespace(name="a model", context=None)


def test_what_can_be_said_of_the_model(scanned):
    found = add_theorems(scanned, MODEL)
    kept = about(found)["theorems"]
    assert [(each["theorem"], each["verdict"]) for each in kept["checked"]] == [
        ("holds", "HOLDS"),
        ("trained", "INCONCLUSIVE"),
        ("violated", "ASSUMPTION-VIOLATED"),
    ]
    assert kept["checked"][0]["where"] == "a model"
    rest = {name: value for name, value in about(found).items() if name != "theorems"}
    assert rest == about(scanned)
    assert found.drop_attrs().identical(scanned.drop_attrs())


def test_what_takes_too_long_is_named(scanned, monkeypatch):
    monkeypatch.setattr(reported, "LEFT_OUT", ("violated",))
    found = add_theorems(scanned, MODEL)
    kept = about(found)["theorems"]
    assert [each["theorem"] for each in kept["checked"]] == ["holds", "trained"]
    assert kept["left_out"] == ["violated"]
    assert "also what took too long here: violated" in render(found)


def test_what_is_left_out_exists_and_says_something_of_models():
    by_name = {each.name: each for each in theorems()}
    assert all(by_name[name].model is not None for name in reported.LEFT_OUT)


@pytest.mark.parametrize(("tokens", "read"), [(None, 128), (40, 40), (4000, 128)])
def test_the_text_that_was_scanned_is_read(scanned, monkeypatch, tokens, read):
    told = []
    monkeypatch.setattr(
        reported, "Trained", lambda loaded, text, tokens: told.append((text, tokens)) or MODEL
    )
    add_theorems(scanned, MODEL, text="It was the best of times.", tokens=tokens)
    assert told == [("It was the best of times.", read)]


def test_the_section_of_the_page(scanned):
    text = render(add_theorems(scanned, MODEL))
    section = text.split('id="theorems"')[1].split("</section>")[0]
    assert section.count("<details>") == 3
    assert "3 statements: 1 HOLDS, 1 ASSUMPTION-VIOLATED, 1 INCONCLUSIVE." in section
    assert "<math" in section
    assert "Condition that is not met: x is large." in section
    assert "also what took too long here" not in section


def test_no_section_without_facts_or_with_others(scanned):
    assert theorem_section(scanned) is None
    assert 'id="theorems"' not in render(scanned)
    found = add_theorems(scanned, MODEL)
    facts = about(found)
    facts["theorems"]["checked"][0]["verdict"] = "from the future"
    found.attrs["about"] = json.dumps(facts)
    assert theorem_section(found) is None
    m_facts = {**facts, "theorems": {"checked": [], "left_out": []}}
    found.attrs["about"] = json.dumps(m_facts)
    assert theorem_section(found) is None
