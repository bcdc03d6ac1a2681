"""Where the norm stands: the checks hold, each can fail, and the known figures come out."""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import pytest

from headwise.observation.run import opened
from headwise.theorems import norm_placement, stable_rates
from headwise.theorems.deep_stacks import Setting, draw, stack
from headwise.theorems.norm_at_start import DEPTHS, draws_of
from headwise.theorems.stable_rates import RATES, Runs, train_all
from headwise.theorems.statement import Effort
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in norm_placement.THEOREMS}
AT_START = ("norm-placement-gradient", "norm-placement-stream", "norm-placement-profile")
MODULE = sys.modules["headwise.theorems.norm_at_start"]


@pytest.mark.parametrize("name", AT_START)
def test_holds(name):
    assert BY_NAME[name].check().verdict == "HOLDS"


def test_learning_rates_take_full_effort():
    outcome = BY_NAME["norm-placement-rates"].check()
    assert outcome.verdict == "INCONCLUSIVE"
    assert "full effort" in outcome.evidence.finding


@pytest.fixture
def fresh(monkeypatch):
    """Nothing that other tests found is used, and nothing is kept; shallower stacks."""
    monkeypatch.setattr(MODULE, "DEPTHS", (3, 6, 12, 24))
    monkeypatch.setattr(MODULE, "draws_of", draws_of.__wrapped__)


def test_scaled_writes_fail(monkeypatch, fresh):
    def scaled(placement, layers, *, writes):
        return Setting(placement, layers, d_model=32, heads=2, tokens=11, writes="scaled")

    monkeypatch.setattr(MODULE, "Setting", scaled)
    assert {BY_NAME[name].check().verdict for name in AT_START[1:]} == {"FAILS"}


def test_a_gradient_that_grows_with_depth_fails(monkeypatch, fresh):
    def small(placement, layers, *, writes):
        return Setting(placement, layers, d_model=32, heads=2, tokens=11, writes=writes)

    def growing(model, setting, seed, *, every):
        found = draw(model, setting, seed, every=every)
        return replace(found, last=found.last * setting.layers)

    monkeypatch.setattr(MODULE, "Setting", small)
    monkeypatch.setattr(MODULE, "draw", growing)
    assert BY_NAME["norm-placement-gradient"].check().verdict == "FAILS"


def test_one_placement_for_both_is_a_broken_check(monkeypatch, fresh):
    def always_pre(placement, layers, *, writes):
        return Setting("pre", layers, d_model=32, heads=2, tokens=11)

    monkeypatch.setattr(MODULE, "Setting", always_pre)
    assert {BY_NAME[name].check().verdict for name in AT_START} == {"CHECK-BROKEN"}


# -- known figures ----------------------------------------------------------------------------


def test_slopes_of_the_top_gradient():
    evidence = BY_NAME["norm-placement-gradient"].check().evidence
    post, pre = (each.value for each in evidence.measured)
    assert post == pytest.approx(0.02, abs=0.06)
    assert pre == pytest.approx(-0.56, abs=0.07)


def test_the_stream_of_every_depth():
    drawn = draws_of(Effort(), "pre")
    ends = [sum(line[i].sizes[-1] for line in drawn) / len(drawn) for i in range(len(DEPTHS))]
    assert ends == pytest.approx([6.2, 12.9, 31.4, 63.6], rel=0.15)
    for depth, end in zip(DEPTHS, ends, strict=True):
        assert 1 + depth / 2 < end < 1 + 1.5 * depth


def test_first_over_last_of_pre_norm():
    drawn = draws_of(Effort(), "pre")
    ratios = [
        sum(line[i].gradients[0] / line[i].gradients[-1] for line in drawn) / len(drawn)
        for i in range(len(DEPTHS))
    ]
    assert ratios == pytest.approx([2.1, 3.2, 4.8, 6.8], rel=0.2)


def test_the_last_gradient_is_that_of_a_whole_backward_pass():
    setting = Setting("pre", 3, d_model=32, heads=2, tokens=11)
    model = stack(setting)
    last = draw(model, setting, 5)
    every = draw(model, setting, 5, every=True)
    assert last.last == pytest.approx(every.gradients[-1], rel=1e-6)
    assert len(every.gradients) == len(every.sizes) == 3


# -- training ---------------------------------------------------------------------------------


def test_the_widest_rate_is_the_largest_that_learns():
    known = math.log(13) / 2
    rows = ((known + 1, known - 1, known - 1, known + 1, math.inf), (9.0,) * 5)
    assert Runs(rows).widest == (RATES[2], 0.0)


def test_training_side_by_side_lowers_the_loss():
    runs = train_all("pre", warmup=0, seeds=range(1), layers=1, steps=23)
    assert len(runs.losses[0]) == len(RATES)
    assert min(runs.losses[0]) < math.log(13) - 0.4
    assert runs.losses[0][0] > min(runs.losses[0])  # the smallest rate has hardly begun


def _trained(widest):
    """Runs whose largest stable rates are given by placement and warmup."""

    def train(placement, *, warmup, seeds):
        place = RATES.index(widest[placement, bool(warmup)])
        row = tuple(0.5 if i <= place else 9.0 for i in range(len(RATES)))
        return Runs((row,) * len(seeds))

    return train


@pytest.mark.parametrize(("post", "verdict"), [(1, "HOLDS"), (3, "FAILS")])
def test_the_verdict_on_learning_rates(monkeypatch, post, verdict):
    widest = {("pre", False): RATES[3], ("pre", True): RATES[4],
              ("post", False): RATES[post], ("post", True): RATES[post + 1]}  # fmt: skip
    monkeypatch.setattr(stable_rates, "train_all", _trained(widest))
    assert BY_NAME["norm-placement-rates"].check(full=True).verdict == verdict


@pytest.mark.slow
def test_learning_rates_hold():
    assert BY_NAME["norm-placement-rates"].check(full=True).verdict == "HOLDS"


# -- trained models ---------------------------------------------------------------------------


def test_the_embedded_model():
    outcome = BY_NAME["norm-placement-gradient"].check_model(
        Trained(opened(None, None, None, False))
    )
    assert outcome.verdict == "ASSUMPTION-VIOLATED"
    assert "layers 0, 1, 2, 3, 4" in outcome.evidence.finding


@pytest.mark.real_model
def test_the_real_models():
    name = "norm-placement-gradient"
    found = BY_NAME[name].check_model(loaded_model("smollm2"))
    assert found.verdict == "ASSUMPTION-VIOLATED"
    assert found.evidence.measured[0].value < 20
    assert BY_NAME[name].check_model(loaded_model("minilm")).verdict == "INCONCLUSIVE"
