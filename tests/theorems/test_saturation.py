"""What saturates and what does not: verdicts, that every check can fail, and known figures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.attention.definition import entropy, weights
from headwise.attention.streaming import attend
from headwise.observation.run import opened
from headwise.theorems import random_energy, saturation
from headwise.theorems.logit_draws import gaussian
from headwise.theorems.saturation import THEOREMS
from headwise.theorems.statement import Effort, Theorem
from headwise.theorems.trained import Trained

BY_NAME = {each.name: each for each in THEOREMS}


@pytest.fixture(scope="module")
def embedded() -> Trained:
    return Trained(opened(None, None, None, False))


@pytest.mark.parametrize("theorem", THEOREMS, ids=lambda each: each.name)
@pytest.mark.parametrize("seed", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_the_verdict_is_the_documented_one(theorem: Theorem, seed: int) -> None:
    claim = theorem.name == "no-gradient-without-scale"
    assert theorem.expected == ("FAILS" if claim else "HOLDS")
    assert theorem.check(seed=seed).verdict == theorem.expected


def frozen(q, k, v, *, scale=None):
    """Unscaled logits of a spread at which every row is one-hot; scaled ones as they are."""
    return attend(q, k, v, scale=None if scale is None else 1e6)


def test_the_claim_would_hold_if_every_row_were_frozen(monkeypatch) -> None:
    monkeypatch.setattr(saturation, "attend", frozen)
    assert BY_NAME["no-gradient-without-scale"].check().verdict == "HOLDS"


def test_gradients_without_a_heavy_tail_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(saturation, "attend", frozen)
    assert BY_NAME["heavy-tailed-gradient"].check().verdict == "FAILS"


def test_a_scale_that_is_ignored_is_noticed(monkeypatch) -> None:
    def ignored(q, k, v, *, scale=None):
        return attend(q, k, v, scale=1.0)

    monkeypatch.setattr(saturation, "attend", ignored)
    assert BY_NAME["scale-free-gradient"].check().verdict == "FAILS"


def test_a_scale_of_another_power_is_noticed(monkeypatch) -> None:
    def power(q, k, v, *, scale=None):
        return attend(q, k, v, scale=1 / q.shape[-1] if scale is None else scale)

    monkeypatch.setattr(saturation, "attend", power)
    assert BY_NAME["scale-free-gradient"].check().verdict == "FAILS"


def test_rows_that_are_alike_or_wide_are_noticed(monkeypatch) -> None:
    monkeypatch.setattr(random_energy, "_normal", random_energy._uniform)
    assert BY_NAME["random-energy-rows"].check().verdict != "HOLDS"


def test_a_softmax_that_is_too_warm_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(random_energy, "weights", lambda s: weights(s / 20))
    assert BY_NAME["random-energy-rows"].check().verdict == "FAILS"
    # Then a spread of 50 is not saturated, so the control that calls it alive holds.
    assert BY_NAME["dead-rows"].check().verdict == "CHECK-BROKEN"


def test_a_spread_of_fifty_is_called_saturated() -> None:
    outcome = BY_NAME["dead-rows"].check()
    share, trace = outcome.evidence.measured[2:]
    assert "saturated" in outcome.evidence.finding
    assert share.value > 0.5
    assert trace.value < 1e-3
    assert all(each.failed for each in outcome.evidence.controls[0].measured)


# n, τ, H, tr J: 2000 rows of independent normal logits, as published with the derivation.
TABLE = [(128, 1, 4.37, 0.980), (128, 8, 0.66, 0.321), (1024, 8, 0.90, 0.399)]


@pytest.mark.parametrize(("n", "tau", "nats", "trace"), TABLE)
def test_known_figures_of_rows(n: int, tau: float, nats: float, trace: float) -> None:
    generator = torch.Generator().manual_seed(n)
    a = random_energy._row_weights(tau * random_energy._normal(generator, 2003, n))
    for found, known in ((entropy(a), nats), (1 - a.square().sum(1), trace)):
        # Both sides are means over 2000 rows; the table has three digits.
        error = 4 * (2 / 2003) ** 0.5 * float(found.std()) + 0.005
        assert float(found.mean()) == pytest.approx(known, abs=error)


# d, rms with the scale, rms without, n = 128.
@pytest.mark.parametrize(
    ("d", "scaled", "raw"),
    [(16, 0.137, 1.23), (64, 0.137, 2.21), (256, 0.137, 3.61), (1024, 0.137, 5.15)],
)
def test_known_figures_of_gradients(d: int, scaled: float, raw: float) -> None:
    generator = torch.Generator().manual_seed(d)
    for scale, known in ((None, scaled), (1.0, raw)):
        squares = torch.stack(
            [saturation._gradients(generator, d, 31, scale).square().mean() for _ in range(29)]
        )
        # Standard error of the mean square on both sides, halved for its root.
        error = 4 * 2**0.5 * float(squares.std() / squares.mean()) / 29**0.5 / 2
        assert float(squares.mean().sqrt()) == pytest.approx(known, rel=error)


def test_the_gradient_of_one_row_is_that_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(7)
    again = torch.Generator().manual_seed(7)
    found = saturation._gradients(generator, 17, 5, None)
    q, k, v, g = (gaussian(again, 1, 1, n, 17) for n in (5, 127, 127, 5))
    a = weights(q @ k.transpose(2, 3) / 17**0.5)[0, 0]
    w = g[0, 0] @ v[0, 0].T
    pulled = a * (w - (a * w).sum(1, keepdim=True))
    expected = (pulled @ k[0, 0] / 17**0.5).square().mean(1).sqrt()
    assert torch.allclose(found, expected, rtol=1e-12)


def test_every_plot_has_prediction_measurement_and_control() -> None:
    plots = [p for each in THEOREMS[:2] for p in each.check(seed=1).evidence.plots]
    assert len(plots) == 3
    for plot in plots:
        assert len(plot.curves) >= 2
        assert all(len(curve.values) == len(plot.places) for curve in plot.curves)


def test_full_effort_has_more_draws() -> None:
    generator = torch.Generator().manual_seed(0)
    quick = saturation._table(generator, Effort(), (17,), scaled=True)
    full = saturation._table(generator, Effort(full=True), (17,), scaled=True)
    assert len(full) > len(quick) >= 8


def test_a_trained_model(embedded: Trained) -> None:
    outcome = BY_NAME["dead-rows"].check_model(embedded)
    assert outcome.verdict == "HOLDS"
    assert "on the first key" in outcome.evidence.finding
    assert [each.name for each in THEOREMS if each.model] == ["dead-rows"]


def test_a_model_of_dead_rows_is_noticed(embedded: Trained) -> None:
    model = Trained(embedded.loaded)
    model.__dict__["heads"] = tuple(
        replace(layer, logits=100 * layer.logits) for layer in embedded.heads
    )
    assert BY_NAME["dead-rows"].check_model(model).verdict == "FAILS"


def test_rows_on_the_first_key_are_apart(embedded: Trained) -> None:
    model = Trained(embedded.loaded)
    layers = []
    for layer in embedded.heads:
        logits = layer.logits.clone()
        logits[:, :, 0] += 1e3
        layers.append(replace(layer, logits=logits))
    model.__dict__["heads"] = tuple(layers)
    outcome = BY_NAME["dead-rows"].check_model(model)
    assert outcome.evidence.measured[0].value == 0
    assert outcome.evidence.finding.startswith("100.0 % of the rows are dead on the first key")


def test_a_model_with_learned_sinks_says_nothing(embedded: Trained) -> None:
    model = Trained(embedded.loaded)
    model.__dict__["heads"] = tuple(
        replace(layer, sinks=torch.zeros(5)) for layer in embedded.heads
    )
    assert BY_NAME["dead-rows"].check_model(model).verdict == "INCONCLUSIVE"


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_the_real_models(name: str) -> None:
    folder = Path(os.environ["HEADWISE_MODELS"])
    path = next((folder / name).glob("*.gguf"), folder / name)
    model = Trained(opened(str(path), None, None, False))
    outcome = BY_NAME["dead-rows"].check_model(model)
    assert outcome.verdict == "HOLDS"
    if name == "smollm2":  # 0.00/.43/.69/.90/.99 on 512 tokens; here rows are shorter
        traces = torch.cat(
            [(1 - layer.weights().square().sum(-1)).mean(1) for layer in model.heads]
        )
        assert traces.median().item() == pytest.approx(0.69, abs=0.15)
        assert traces.min().item() < 0.01
