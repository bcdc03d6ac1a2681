"""Sinusoidal positions: the checks hold, each can fail, and the known figures come out."""

from __future__ import annotations

import math
import sys

import pytest
import torch

from headwise.models import build
from headwise.models.presets import transformer_sizes
from headwise.observation.loading import wrap_model
from headwise.positions import sinusoidal_table
from headwise.theorems import sinusoids
from headwise.theorems.position_tables import extrapolated, has_position_table, position_table
from headwise.theorems.sinusoids import toeplitz_deviation
from headwise.theorems.statement import NotApplicable
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in sinusoids.THEOREMS}
MODULE = sys.modules["headwise.theorems.sinusoids"]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(BY_NAME))
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


@pytest.mark.parametrize("name", ["sinusoid-shift", "sinusoid-products", "sinusoid-recoverable"])
def test_a_table_of_other_numbers_fails(monkeypatch, name):
    def noisy(ids, width, *, dtype):
        generator = torch.Generator().manual_seed(int(ids.sum()))
        noise = torch.randn(*ids.shape, width, generator=generator, dtype=torch.float64)
        return sinusoids_of(ids, width, dtype=dtype) + 0.1 * noise.to(dtype)

    sinusoids_of = MODULE.sinusoidal
    monkeypatch.setattr(MODULE, "sinusoidal", noisy)
    assert BY_NAME[name].check().verdict == "FAILS"


def test_the_shift_of_another_base_fails(monkeypatch):
    known = MODULE.shift_matrix
    monkeypatch.setattr(MODULE, "shift_matrix", lambda w, step: known(w, step, base=9_000.0))
    assert BY_NAME["sinusoid-shift"].check().verdict == "FAILS"


def test_a_deviation_that_is_always_zero_is_a_broken_check(monkeypatch):
    monkeypatch.setattr(MODULE, "toeplitz_deviation", lambda matrix: 0.0)
    assert BY_NAME["sinusoid-logits"].check().verdict == "CHECK-BROKEN"


def test_a_fit_that_is_always_perfect_is_a_broken_check(monkeypatch):
    monkeypatch.setattr(MODULE, "extrapolated", lambda table, step, fitted: 0.0)
    assert BY_NAME["sinusoid-recoverable"].check().verdict == "CHECK-BROKEN"


# -- known figures ----------------------------------------------------------------------------


def test_the_slowest_wavelength():
    assert 2 * math.pi * 10_000 ** (510 / 512) == pytest.approx(60_611, abs=0.5)
    at = sinusoidal_table(2, 512, dtype=torch.float64)[1, 510]  # sin of the slowest frequency
    assert 2 * math.pi / math.asin(float(at)) == pytest.approx(60_611, abs=0.5)


def test_a_shift_is_recovered_and_a_random_table_is_not():
    table = sinusoidal_table(293, 16, dtype=torch.float64)
    assert extrapolated(table, 1, 150) < 1e-5
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(293, 64, generator=generator, dtype=torch.float64)
    assert extrapolated(random, 1, 150) == pytest.approx(1.2, abs=0.2)


def test_the_deviation_of_random_weights():
    table = sinusoidal_table(128, 64, dtype=torch.float64)
    assert toeplitz_deviation(table @ table.T) < 1e-13
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        w = torch.randn(64, 64, generator=generator, dtype=torch.float64)
        assert toeplitz_deviation(table @ w @ table.T) == pytest.approx(0.97, abs=0.06)


# -- trained models ---------------------------------------------------------------------------


def test_a_wide_table_is_fitted_on_few_directions():
    wide = sinusoidal_table(512, 384, dtype=torch.float64)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    assert extrapolated(wide, 1, 341) < 0.05
    assert extrapolated(wide[order], 1, 341) > 0.5


def test_where_the_table_of_a_model_is():
    sizes = transformer_sizes(vocab=97, d_model=12, layers=1, heads=2, d_ff=29, context=61)
    table, stored = position_table(build(sizes))
    assert table.shape == (512, 12)
    assert not stored
    assert not has_position_table(torch.nn.Linear(2, 3))
    with pytest.raises(NotApplicable, match="adds no vectors"):
        position_table(torch.nn.Linear(2, 3))


def test_a_model_with_sinusoids_holds():
    sizes = transformer_sizes(vocab=97, d_model=12, layers=1, heads=2, d_ff=29, context=61)
    model = Trained(wrap_model(build(sizes), name="sinusoids"))
    assert BY_NAME["sinusoid-recoverable"].check_model(model).verdict == "HOLDS"


@pytest.mark.real_model
def test_learned_positions_violate_the_condition():
    outcome = BY_NAME["sinusoid-recoverable"].check_model(loaded_model("minilm"))
    assert outcome.verdict == "ASSUMPTION-VIOLATED"
    assert outcome.evidence.measured[0].value == pytest.approx(0.181, abs=0.02)
    assert BY_NAME["sinusoid-recoverable"].check_model(loaded_model("smollm2")).verdict == (
        "INCONCLUSIVE"
    )
