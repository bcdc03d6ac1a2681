"""Rank collapse, and the entropy bound."""

from __future__ import annotations

import pytest
import torch

from headwise.theorems import entropy_bound, rank_collapse
from headwise.theorems.entropy_bound import attained, bound
from headwise.theorems.rank_collapse import draw_layer, residual

BY_NAME = {each.name: each for each in (*rank_collapse.THEOREMS, *entropy_bound.THEOREMS)}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


@pytest.mark.parametrize("around", ["skip", "causal", "bias"])
def test_a_dropped_condition_is_noticed(monkeypatch, around):
    def other(generator, heads, d, d_head, **given):
        return draw_layer(generator, heads, d, d_head, **{**given, around: True})

    monkeypatch.setattr(rank_collapse, "draw_layer", other)
    assert BY_NAME["cubic-contraction"].check().verdict == "FAILS"


def test_a_skip_connection_keeps_tokens_apart(monkeypatch):
    def other(generator, heads, d, d_head, **given):
        return draw_layer(generator, heads, d, d_head, **{**given, "skip": True})

    monkeypatch.setattr(rank_collapse, "draw_layer", other)
    assert BY_NAME["collapse-with-depth"].check().verdict == "FAILS"


def test_the_residual_of_equal_tokens_is_0():
    assert residual(torch.ones(7, 5, dtype=torch.float64)) == 0


def test_a_wrong_entropy_is_noticed(monkeypatch):
    entropy = entropy_bound.entropy
    monkeypatch.setattr(entropy_bound, "entropy", lambda a: 0.999 * entropy(a))
    assert BY_NAME["entropy-bound"].check().verdict == "FAILS"


def test_a_bound_that_is_too_low_is_noticed(monkeypatch):
    monkeypatch.setattr(entropy_bound, "bound", lambda size, keys: bound(1.01 * size, keys))
    assert BY_NAME["entropy-bound"].check().verdict == "FAILS"


def test_figures():
    # notes: worst slack −3e-15, attained; slopes 3.000, 2.997 and 1.000, .999, 1.001.
    assert attained(13, torch.linspace(0.01, 20, 97, dtype=torch.float64)) < 1e-12
    zero = torch.zeros(1, dtype=torch.float64)
    assert float(bound(zero, torch.tensor([13]))) == pytest.approx(2.5649493574615367, abs=1e-15)
    evidence = BY_NAME["cubic-contraction"].check().evidence
    assert [each.value for each in evidence.measured] == pytest.approx([3, 3], abs=0.01)
    controls = [control.measured[0].value for control in evidence.controls]
    assert controls == pytest.approx([1, 1, 1], abs=0.01)
