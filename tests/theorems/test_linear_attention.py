"""Random features and the causal forms of linear attention."""

from __future__ import annotations

import pytest
import torch

from headwise.attention import linear
from headwise.attention.feature_maps import PositiveRandomFeatures
from headwise.theorems.linear_attention import THEOREMS
from headwise.theorems.random_features import pair, trigonometric, variance_of

BY_NAME = {each.name: each for each in THEOREMS}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("seed", [0, 1])
def test_it_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


def test_features_without_the_norm_are_noticed(monkeypatch):
    def unnormed(self, x):
        features, d = self.projection.shape
        return torch.exp(x * d**-0.25 @ self.projection.T) / features**0.5

    monkeypatch.setattr(PositiveRandomFeatures, "__call__", unnormed)
    assert BY_NAME["random-features"].check().verdict == "FAILS"


def test_directions_that_are_not_orthogonal_are_noticed(monkeypatch):
    def alike(d, features, *, generator):
        one = torch.randn(1, d, generator=generator, dtype=torch.float64)
        return PositiveRandomFeatures(one.expand(features, d))

    monkeypatch.setattr(PositiveRandomFeatures, "orthogonal", alike)
    assert BY_NAME["orthogonal-features"].check().verdict == "FAILS"


def test_an_output_that_is_no_mean_is_noticed(monkeypatch):
    monkeypatch.setattr(linear, "linear_attention", lambda q, k, v, phi: torch.zeros_like(v))
    assert BY_NAME["features-needed"].check().verdict == "FAILS"


def test_a_state_that_forgets_is_noticed(monkeypatch):
    absorb = linear.LinearState.absorb

    def forgetful(self, features, values):
        found = absorb(self, features, values)
        return linear.LinearState(0.99 * found.weighted, found.total, found.keys)

    monkeypatch.setattr(linear.LinearState, "absorb", forgetful)
    assert BY_NAME["recurrent-is-parallel"].check().verdict == "FAILS"


def test_the_error_of_a_variance_is_that_of_its_spread():
    # z over repetitions has a standard deviation of 1: 101 draws of it, 4 errors of a deviation.
    generator = torch.Generator().manual_seed(0)
    x, y = pair(5, 0.5, generator)
    z = [
        variance_of(trigonometric(x, y, 997, generator), x, y, "", trig=True).z for _ in range(101)
    ]
    assert abs(float(torch.tensor(z).std()) - 1) < 4 / (2 * 101) ** 0.5


def test_figures():
    # notes, σ = 1: uniform baseline .78, elu + 1 .75; 512 features are worse than both.
    evidence = BY_NAME["features-needed"].check().evidence
    assert "against 0.80 and 0.77" in evidence.finding or "against 0.79 and 0.76" in (
        evidence.finding
    )
    assert evidence.controls[0].measured[0].value > 1.5
    # notes: |x' + y'|² = 11 shows under a hundredth or so of the variance.
    assert "11," in BY_NAME["random-features"].check().evidence.finding
