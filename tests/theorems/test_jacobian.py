"""The softmax Jacobian: verdicts, that every check can fail, and known bounds."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.attention.definition import weights
from headwise.attention.streaming import attend
from headwise.observation.run import opened
from headwise.theorems import jacobian, saturation_bounds
from headwise.theorems.jacobian import THEOREMS
from headwise.theorems.saturation_bounds import jacobian_of_weights, sample_logits, trained_rows
from headwise.theorems.statement import Theorem
from headwise.theorems.trained import Trained

BY_NAME = {each.name: each for each in THEOREMS}


@pytest.fixture(scope="module")
def embedded() -> Trained:
    return Trained(opened(None, None, None, False))


@pytest.mark.parametrize("theorem", THEOREMS, ids=lambda each: each.name)
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_the_statement_holds(theorem: Theorem, seed: int) -> None:
    assert theorem.check(seed=seed).verdict == "HOLDS"


def warm(s, keep=None, sinks=None):
    """A softmax with a temperature."""
    return weights(s / 2, keep, sinks)


def leaky(s, keep=None, sinks=None):
    """Rows sum to 1.01."""
    return 1.01 * weights(s, keep, sinks)


def test_a_scale_that_the_backward_pass_forgets_is_noticed(monkeypatch) -> None:
    def unscaled(q, k, v):
        return attend(q, k, v, scale=1.0)

    monkeypatch.setattr(jacobian, "attend", unscaled)
    assert BY_NAME["softmax-jacobian"].check().verdict == "FAILS"


def test_another_softmax_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(jacobian, "weights", leaky)
    assert BY_NAME["softmax-jacobian"].check().verdict == "FAILS"
    assert BY_NAME["jacobian-is-a-variance"].check().verdict == "FAILS"
    monkeypatch.setattr(saturation_bounds, "weights", leaky)
    assert BY_NAME["jacobian-spectrum"].check().verdict == "FAILS"


def test_a_temperature_is_noticed_by_the_gradient_alone(monkeypatch) -> None:
    """Its rows are distributions, so every other statement still holds."""
    monkeypatch.setattr(jacobian, "weights", warm)
    assert BY_NAME["softmax-jacobian"].check().verdict == "FAILS"
    assert BY_NAME["jacobian-is-a-variance"].check().verdict == "HOLDS"


def test_a_wrong_formula_is_noticed(monkeypatch) -> None:
    def off(a):
        return jacobian_of_weights(a) + 1e-9

    monkeypatch.setattr(jacobian, "jacobian_of_weights", off)
    monkeypatch.setattr(saturation_bounds, "jacobian_of_weights", off)
    for theorem in THEOREMS[:3]:
        assert theorem.check().verdict == "FAILS", theorem.name


def test_a_norm_that_passes_the_bound_is_noticed(monkeypatch) -> None:
    def doubled(a):
        return 2.1 * jacobian_of_weights(a)

    monkeypatch.setattr(saturation_bounds, "jacobian_of_weights", doubled)
    assert BY_NAME["saturation-bound"].check().verdict == "FAILS"


def test_a_variance_in_one_pass_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(jacobian, "_two_pass", jacobian._one_pass)
    assert BY_NAME["jacobian-is-a-variance"].check().verdict != "HOLDS"


def test_the_bounds_of_the_largest_eigenvalue_are_attained() -> None:
    half = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    assert torch.linalg.eigvalsh(jacobian_of_weights(half))[0, -1].item() == pytest.approx(0.5)
    flat = torch.full((1, 7), 1 / 7, dtype=torch.float64)
    assert torch.linalg.eigvalsh(jacobian_of_weights(flat))[0, -1].item() == pytest.approx(1 / 7)


def test_rows_run_from_flat_to_concentrated() -> None:
    a = weights(sample_logits(torch.Generator().manual_seed(0), 503, 29)[None, None])[0, 0]
    assert a.amax(1).min() < 0.06
    assert a.amax(1).max() > 1 - 1e-6


def test_a_trained_model(embedded: Trained) -> None:
    with_model = [each for each in THEOREMS if each.model]
    assert len(with_model) == 3
    assert [each.check_model(embedded).verdict for each in with_model] == ["HOLDS"] * 3
    s, a = trained_rows(embedded)
    assert s.shape == a.shape == (25, 128)


def test_a_model_whose_softmax_is_another_is_noticed(embedded: Trained, monkeypatch) -> None:
    monkeypatch.setattr(jacobian, "weights", warm)
    assert BY_NAME["softmax-jacobian"].check_model(embedded).verdict == "FAILS"
    monkeypatch.setattr(saturation_bounds, "weights", leaky)
    assert BY_NAME["jacobian-spectrum"].check_model(embedded).verdict == "FAILS"


def test_models_with_nothing_to_say(embedded: Trained) -> None:
    sinks, flat = Trained(embedded.loaded), Trained(embedded.loaded)
    layers = embedded.heads
    sinks.__dict__["heads"] = tuple(replace(x, sinks=torch.zeros(5)) for x in layers)
    flat.__dict__["heads"] = tuple(replace(x, logits=0 * x.logits) for x in layers)
    for name, model, words in (
        ("jacobian-spectrum", sinks, "learned sink"),
        ("saturation-bound", flat, "between one half and one"),
    ):
        outcome = BY_NAME[name].check_model(model)
        assert outcome.verdict == "INCONCLUSIVE"
        assert words in outcome.evidence.finding


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_the_real_models(name: str) -> None:
    folder = Path(os.environ["HEADWISE_MODELS"])
    path = next((folder / name).glob("*.gguf"), folder / name)
    model = Trained(opened(str(path), None, None, False))
    assert [each.check_model(model).verdict for each in THEOREMS if each.model] == ["HOLDS"] * 3
