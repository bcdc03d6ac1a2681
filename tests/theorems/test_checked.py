"""Statements with their outcomes: what is expected, and what JSON keeps of them."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from headwise.theorems.checked import check_model, check_random, from_json, to_json
from headwise.theorems.statement import Outcome
from tests.theorems import made_up as m

EVERY = (m.HOLDS, m.FAILS, m.OFTEN, m.OPEN, m.VIOLATED, m.BROKEN, m.TRAINED)
MODEL = SimpleNamespace(name="a model")


def random(*statements, **more):
    return check_random([("made up", each) for each in statements], **more)


def trained(*statements):
    return check_model([("made up", each) for each in statements], MODEL)


def test_what_is_expected_on_random_weights():
    assert [(each.outcome.verdict, each.as_expected) for each in random(*EVERY)] == [
        ("HOLDS", True),
        ("FAILS", False),
        ("FAILS", True),
        ("INCONCLUSIVE", True),
        ("ASSUMPTION-VIOLATED", False),
        ("CHECK-BROKEN", False),
        ("INCONCLUSIVE", True),
    ]


def test_a_model_may_violate_an_assumption_and_not_fail():
    failing = m.theorem("x", None, lambda model: m.evidence(measured=(m.BAD,)))
    found = trained(m.HOLDS, m.VIOLATED, m.OPEN, m.FAILS, failing)
    assert [(each.outcome.verdict, each.as_expected) for each in found] == [
        ("HOLDS", True),
        ("ASSUMPTION-VIOLATED", True),
        ("INCONCLUSIVE", True),
        ("INCONCLUSIVE", True),
        ("FAILS", False),
    ]
    assert found[2].outcome.evidence.finding == "it has no heads"


def test_a_model_that_cannot_be_measured_is_said():
    (found,) = trained(m.TRAINED)
    assert (found.outcome.verdict, found.outcome.where) == ("INCONCLUSIVE", "a model")
    assert found.outcome.evidence.inconclusive == "layer 3 is NaN"


def test_a_bug_is_not_hidden():
    def broken(model):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        trained(m.theorem("x", None, broken))


def test_seed_and_effort_arrive():
    (found,) = random(m.HOLDS, full=True, seed=7)
    assert found.outcome.evidence.finding == "many"
    assert found.outcome.evidence.measured[0].value == 7


def test_progress_names_what_is_checked():
    told = []
    random(m.HOLDS, m.OPEN, progress=lambda *each: told.append(each))
    assert told == [(0, 2, "holds"), (1, 2, "open")]


@pytest.mark.parametrize("statement", EVERY, ids=lambda each: each.name)
def test_json_keeps_everything(statement):
    (found,) = random(statement)
    text = json.dumps(to_json(found), allow_nan=False)
    again = from_json(json.loads(text))
    assert again.subject == "made up"
    for name in ("name", "title", "latex", "conditions", "kind", "textbook", "expected"):
        assert getattr(again.theorem, name) == getattr(found.theorem, name)
    assert to_json(again) == to_json(found)
    before, after = found.outcome.evidence, again.outcome.evidence
    assert after.measured == before.measured
    assert after.controls == before.controls
    assert [each.holds for each in after.measured] == [each.holds for each in before.measured]


def test_json_has_the_fields_of_an_outcome():
    (found,) = random(m.VIOLATED)
    got = to_json(found)
    assert {*Outcome.__slots__} <= {*got}
    assert got["verdict"] == "ASSUMPTION-VIOLATED"
    assert got["evidence"]["violated"] == "x is large"
    near, slope = got["evidence"]["measured"][1:]
    assert near["z"] == pytest.approx(3.5)
    assert (near["holds"], near["warns"]) == (True, True)
    assert slope["allowed"] == ["-inf", -0.3]
    assert got["evidence"]["controls"][0]["failed"] is True
    assert got["evidence"]["plots"][0]["curves"][1]["values"] == [1.1, None, 0.9]


def test_numbers_that_are_not_finite_come_back():
    plots = from_json(to_json(random(m.VIOLATED)[0])).outcome.evidence.plots
    assert math.isnan(plots[0].curves[1].values[1])


@pytest.mark.parametrize("missing", ["statement", "evidence", "verdict"])
def test_facts_of_another_version_are_refused(missing):
    got = to_json(random(m.HOLDS)[0])
    del got[missing]
    with pytest.raises(KeyError):
        from_json(got)
    got[missing] = "from the future"
    with pytest.raises((TypeError, ValueError)):
        from_json(got)
