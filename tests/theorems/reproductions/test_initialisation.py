"""Vaswani's variance and Xiong's top gradient, repeated."""

from __future__ import annotations

import sys

import pytest

from headwise.theorems.norm_placement import THEOREMS as NORMS
from headwise.theorems.reproductions import initialisation

BY_NAME = {each.name: each for each in initialisation.THEOREMS}
MODULE = sys.modules["headwise.theorems.reproductions.initialisation"]


def test_each_says_what_it_repeats():
    assert [(name, each.reproduces[:2]) for name, each in BY_NAME.items()] == [
        ("vaswani-variance", "B1"),
        ("xiong-gradient-by-depth", "B2"),
        ("xiong-stream-growth", "B3"),
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_variance(seed):
    outcome = BY_NAME["vaswani-variance"].check(seed=seed)
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.measured[-1].value == pytest.approx(0.5, abs=0.01)


def test_correlated_entries_fail(monkeypatch):
    known = MODULE._products
    monkeypatch.setattr(MODULE, "_products", lambda effort, common: known(effort, 0.3))
    assert BY_NAME["vaswani-variance"].check().verdict == "FAILS"


def test_a_control_without_correlation_is_a_broken_check(monkeypatch):
    known = MODULE._products
    monkeypatch.setattr(MODULE, "_products", lambda effort, common: known(effort, 0.0))
    assert BY_NAME["vaswani-variance"].check().verdict == "CHECK-BROKEN"


def test_the_variance_of_entries_with_a_common_factor():
    """d + d (d − 1) c²: 424 for d = 64 and c = 0.3, within the spread of a heavy-tailed sum."""
    evidence = BY_NAME["vaswani-variance"].check().evidence
    for each in evidence.controls[0].measured[:-1]:
        width = int(each.name.rpartition(" ")[2])
        assert each.value == pytest.approx(1 + (width - 1) * 0.09, rel=0.12)


def test_xiong_is_the_check_of_the_theory():
    theory = {each.name: each for each in NORMS}
    assert BY_NAME["xiong-gradient-by-depth"].random is theory["norm-placement-gradient"].random
    assert BY_NAME["xiong-stream-growth"].random is theory["norm-placement-stream"].random
