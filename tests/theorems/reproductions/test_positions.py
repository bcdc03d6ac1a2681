"""Su's curve, Barbero's Gaussians and bands, and the bound of interpolation, repeated."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch

from headwise.models import build
from headwise.models.presets import decoder_sizes
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.positions import frequencies
from headwise.theorems.reproductions import positions
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in positions.THEOREMS}
MODULE = sys.modules["headwise.theorems.reproductions.positions"]
DECAY = sys.modules["headwise.theorems.rotary_decay"]
RANDOM = [name for name, each in BY_NAME.items() if each.random is not None]


def test_each_says_what_it_repeats():
    assert [(name, each.reproduces.split(":")[0]) for name, each in BY_NAME.items()] == [
        ("su-decay-curve", "B11"),
        ("barbero-no-decay", "B12"),
        ("barbero-frequency-use", "B12"),
        ("position-interpolation-bound", "B24"),
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", RANDOM)
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


# -- the checks can fail ----------------------------------------------------------------------


def test_other_frequencies_fail(monkeypatch):
    known = DECAY.partial_sums
    monkeypatch.setattr(
        DECAY, "partial_sums", lambda at, width, base=1e4: known(at, width, base / 2)
    )
    assert BY_NAME["su-decay-curve"].check().verdict == "FAILS"


def test_a_coarser_grid_breaks_the_bound(monkeypatch):
    known = MODULE._interpolated
    monkeypatch.setattr(MODULE, "_interpolated", lambda h, at, width: 4 * known(h, at, width))
    assert BY_NAME["position-interpolation-bound"].check().verdict == "FAILS"


def test_an_error_that_is_always_small_is_a_broken_check(monkeypatch):
    monkeypatch.setattr(MODULE, "_interpolated", lambda h, at, width: torch.zeros(1))
    assert BY_NAME["position-interpolation-bound"].check().verdict == "CHECK-BROKEN"


def test_bands_that_are_always_slow_are_a_broken_check(monkeypatch):
    monkeypatch.setattr(MODULE, "_quarters", lambda shares, inv_freq: torch.tensor([0, 0, 0, 1.0]))
    assert BY_NAME["barbero-frequency-use"].check_model(_made(True)).verdict == "CHECK-BROKEN"


# -- known figures ----------------------------------------------------------------------------


def test_the_published_constant_and_the_worst_case():
    assert 32 * math.log(10_000) == pytest.approx(294.73, abs=0.01)
    theta = frequencies(128).inv_freq
    in_phase = torch.polar(torch.ones_like(theta), -1000.5 * theta)[None]
    found = float(MODULE._interpolated(in_phase, torch.tensor([1000.5]).double(), 128))
    assert found == pytest.approx(float((1 - (theta / 2).cos()).sum()), rel=1e-9)
    assert 128 / 294.73 < found < 1 / (8 * (1 - 10_000 ** (-4 / 128)))


def test_quarters_go_from_fast_to_slow():
    shares = torch.tensor([0.4, 0.3, 0.2, 0.05, 0.05])
    found = MODULE._quarters(shares, torch.tensor([0.001, 0.01, 0.1, 1.0]))
    assert found.tolist() == pytest.approx([0.05, 0.2, 0.3, 0.45])


# -- trained models ---------------------------------------------------------------------------


def _made(slow: bool) -> SimpleNamespace:
    """A model whose queries and keys are large in slow pairs, or in fast ones."""
    inv_freq = frequencies(8).inv_freq
    size = torch.tensor([0.1, 0.2, 1.0, 3.0] if slow else [3.0, 1.0, 0.2, 0.1]).repeat(2)
    q = size * torch.randn(3, 11, 8, generator=torch.Generator().manual_seed(0))
    turns = SimpleNamespace(inv_freq=inv_freq, width=8, layout="half", factor=1.0)
    layer = SimpleNamespace(module="m", rotary=turns)
    head = SimpleNamespace(module="m", role="decoder", q=q, k=q)
    return SimpleNamespace(
        name="made", seed=0, weights=SimpleNamespace(layers=[layer]), heads=(head,)
    )


@pytest.mark.parametrize(("slow", "verdict"), [(True, "HOLDS"), (False, "FAILS")])
def test_bands_of_a_made_model(slow, verdict):
    assert BY_NAME["barbero-frequency-use"].check_model(_made(slow)).verdict == verdict


def test_the_embedded_model_is_near_the_border():
    outcome = BY_NAME["barbero-frequency-use"].check_model(Trained(opened(None, None, None, False)))
    assert outcome.verdict == "INCONCLUSIVE"
    assert outcome.evidence.measured[0].value == pytest.approx(0.58, abs=0.03)


def test_a_model_without_rotation():
    sizes = decoder_sizes(
        vocab=97, d_model=12, layers=1, heads=3, d_ff=29, context=61, rotary=None, alibi=True
    )
    model = Trained(wrap_model(build(sizes), name="alibi"), [i % 97 for i in range(31)])
    assert BY_NAME["barbero-frequency-use"].check_model(model).verdict == "INCONCLUSIVE"


@pytest.mark.real_model
def test_the_real_models():
    outcome = BY_NAME["barbero-frequency-use"].check_model(loaded_model("smollm2"))
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.measured[0].value == pytest.approx(0.78, abs=0.03)
    assert "0%" in outcome.evidence.finding
    assert BY_NAME["barbero-frequency-use"].check_model(loaded_model("minilm")).verdict == (
        "INCONCLUSIVE"
    )
