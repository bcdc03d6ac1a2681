"""Induction takes two layers."""

from __future__ import annotations

import pytest
import torch

from headwise.theorems import induction
from headwise.theorems.induction import THEOREMS
from headwise.theorems.induction_training import SHORTEST, Trial, repeats

(THEOREM,) = THEOREMS

GOOD = Trial(0.93, (0.9, 0.2), (0.1, 0.8))
POOR = Trial(0.24, (0.3,), (0.1,))
FIXED = Trial(1.0, (0.3,), (0.1,))
FRESH = Trial(0.03, (0.09, 0.09), (0.04, 0.04))


def told(monkeypatch, two=GOOD, one=POOR, fixed=FIXED):
    def trial(layers, steps, seed, *, period=None):
        if not steps:
            return FRESH
        return two if layers == 2 else one if period is None else fixed

    monkeypatch.setattr(induction, "trial", trial)
    return THEOREM.check()


def test_it_holds():
    outcome = THEOREM.check()
    assert outcome.verdict == "HOLDS"
    # notes: two layers .96, previous .86 to .89, induction .6; one layer .25; fixed period 1.
    two, one, previous, matching = (each.value for each in outcome.evidence.measured)
    assert two > 0.88
    assert 0.2 < one < 0.4
    assert previous > 0.7
    assert matching > 0.4
    assert outcome.evidence.controls[1].measured[0].value > 0.99


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "HOLDS"),
        ({"two": POOR}, "FAILS"),
        ({"one": Trial(0.7, (0.1,), (0.1,))}, "FAILS"),
        ({"two": Trial(0.93, (0.3, 0.9), (0.1, 0.8))}, "FAILS"),
        ({"two": Trial(0.93, (0.9, 0.3), (0.8, 0.1))}, "FAILS"),
        ({"one": GOOD}, "CHECK-BROKEN"),
        ({"fixed": POOR}, "CHECK-BROKEN"),
    ],
)
def test_what_is_found_decides(monkeypatch, change, verdict):
    assert told(monkeypatch, **change).verdict == verdict


def test_repeats():
    ids, known = repeats(torch.Generator().manual_seed(0), 31)
    periods = {int((~row).sum()) for row in known}
    assert len(periods) > 5
    assert min(periods) >= SHORTEST
    assert max(periods) <= 2 * SHORTEST
    for row, seen in zip(ids, known, strict=True):
        period = int((~seen).sum())
        assert bool((row[period:] == row[:-period]).all())
