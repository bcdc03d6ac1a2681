"""Mean and variance of logits: verdicts, that every check can fail, and known figures."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headwise.attention.definition import scores
from headwise.observation.run import opened
from headwise.theorems import logit_draws, logit_moments, logit_rows, scaling, trained_spread
from headwise.theorems.logit_draws import aligned, logits, normal, shared_factor
from headwise.theorems.scaling import THEOREMS
from headwise.theorems.statement import NotApplicable, Theorem
from headwise.theorems.trained import Trained
from headwise.theorems.trained_spread import spread

BY_NAME = {each.name: each for each in THEOREMS}


@pytest.fixture(scope="module")
def embedded() -> Trained:
    return Trained(opened(None, None, None, False))


@pytest.mark.parametrize("theorem", THEOREMS, ids=lambda each: each.name)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_statement_holds(theorem: Theorem, seed: int) -> None:
    outcome = theorem.check(seed=seed)
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.finding.endswith(".")


def wrong_logits(q, k, scale=1.0):
    """Without the scale where it is asked for, and too large by a tenth where it is not."""
    return logits(q, k, 1.1 if scale is not None else 1.0)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("logit-variance", scaling),
        ("logit-scaling", scaling),
        ("logit-moments", logit_moments),
        ("correlated-queries-and-keys", logit_moments),
        ("correlated-coordinates", logit_moments),
    ],
)
def test_wrong_logits_are_noticed(monkeypatch, name, module) -> None:
    monkeypatch.setattr(module, "logits", wrong_logits)
    assert BY_NAME[name].check().verdict != "HOLDS"


def test_a_wrong_default_scale_is_noticed(monkeypatch) -> None:
    def by_d(q, k, *, scale=None):
        return scores(q, k, scale=1 / q.shape[-1] if scale is None else scale)

    monkeypatch.setattr(logit_draws, "scores", by_d)
    assert BY_NAME["logit-scaling"].check().verdict == "FAILS"


@pytest.mark.parametrize("name", ["logits-of-one-matrix", "logits-within-a-row"])
def test_a_wrong_definition_is_noticed(monkeypatch, name) -> None:
    def unscaled(q, k, *, scale=None):
        return scores(q, k, scale=1.0)

    monkeypatch.setattr(logit_moments, "scores", unscaled)
    monkeypatch.setattr(logit_rows, "scores", unscaled)
    assert BY_NAME[name].check().verdict == "FAILS"


def test_growth_without_alignment_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(scaling, "aligned", lambda rho: normal)
    # Then √d is the right divisor, so the control that divides by it holds as well.
    assert BY_NAME["logit-growth"].check().verdict == "CHECK-BROKEN"


def test_a_check_whose_control_holds_is_broken(monkeypatch) -> None:
    monkeypatch.setattr(scaling, "shared_factor", lambda c: normal)
    assert BY_NAME["logit-variance"].check().verdict == "CHECK-BROKEN"


@pytest.mark.parametrize("c", [0.0, 0.3])
def test_the_general_formula_in_known_cases(c: float) -> None:
    d = 17
    cov = (1 - c) * torch.eye(d) + c * torch.ones(d, d)
    zero, mean = torch.zeros(d), torch.full((d,), 0.5)
    plain = logit_moments.general_variance(zero, cov, zero, cov)
    assert plain.item() == pytest.approx(d + d * (d - 1) * c**2, rel=1e-6)
    shifted = logit_moments.general_variance(mean, torch.eye(d), mean, torch.eye(d))
    assert shifted.item() == pytest.approx(d + 2 * d / 4, rel=1e-6)


# Published with the derivation: correlation ½ and common factor 0.3 at d_k = 16, 64, 256.
@pytest.mark.parametrize(("d", "ratio"), [(16, 37.6 / 16), (64, 427 / 64), (256, 6131 / 256)])
def test_known_figures_of_correlated_controls(d: int, ratio: float) -> None:
    generator, pairs = torch.Generator().manual_seed(d), 20011
    s = logits(*aligned(0.5)(generator, pairs, d))
    # Relative standard error of a variance: √((2 + κ)/N), κ ≤ 6 here.
    assert s.mean().item() / d == pytest.approx(0.5, abs=4 * math.sqrt(1.25 / d / pairs))
    assert s.var().item() / d == pytest.approx(1.25, rel=4 * math.sqrt(8 / pairs))
    common = logits(*shared_factor(0.3)(generator, pairs, d))
    assert common.var().item() / d == pytest.approx(ratio, rel=4 * math.sqrt(8 / pairs))


def test_known_figure_of_one_matrix() -> None:
    n, d = 256, 64
    assert math.sqrt(4 / (n * d) + 2 * (1 + 1 / d) / n**2) == pytest.approx(0.0166, abs=5e-5)
    assert math.sqrt((2 + 6 / d) / n**2) == pytest.approx(0.0057, abs=5e-5)


@pytest.mark.parametrize(("d", "rms"), [(16, 6.4), (64, 21.1), (256, 79.2), (1024, 308.5)])
def test_known_figures_of_growth(d: int, rms: float) -> None:
    exact = math.sqrt(0.09 * d**2 + d * 1.09)
    assert exact == pytest.approx(rms, rel=0.02)


def test_a_trained_model(embedded: Trained) -> None:
    verdicts = {each.name: each.check_model(embedded).verdict for each in THEOREMS if each.model}
    assert verdicts == {
        "logit-variance": "ASSUMPTION-VIOLATED",
        "logit-moments": "HOLDS",
        "logits-within-a-row": "HOLDS",
    }


def test_a_spread_that_is_not_of_these_queries_is_noticed(embedded: Trained) -> None:
    changed = Trained(embedded.loaded)
    layers = tuple(replace(layer, logits=3 * layer.logits) for layer in embedded.heads)
    changed.__dict__["heads"] = layers
    for name in ("logit-moments", "logits-within-a-row"):
        assert BY_NAME[name].check_model(changed).verdict == "FAILS"


def test_the_formula_is_an_identity_where_all_sees_all(embedded: Trained) -> None:
    full = Trained(embedded.loaded)
    full.__dict__["heads"] = tuple(
        replace(
            layer,
            keep=torch.ones_like(layer.keep),
            logits=layer.scale * layer.q @ layer.k.transpose(1, 2),
        )
        for layer in embedded.heads
    )
    outcome = BY_NAME["logit-moments"].check_model(full)
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.measured[0].tolerance is not None


def test_centred_queries_meet_the_assumption(embedded: Trained) -> None:
    generator = torch.Generator().manual_seed(3)
    model = Trained(embedded.loaded)
    shape = embedded.heads[0].q.shape
    layers = []
    for layer in embedded.heads:
        q, k = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        logits = layer.scale * q @ k.transpose(1, 2)
        layers.append(replace(layer, q=q, k=k, logits=logits))
    model.__dict__["heads"] = tuple(layers)
    assert BY_NAME["logit-variance"].check_model(model).verdict == "HOLDS"


def test_logits_with_a_bias_are_left_out(embedded: Trained) -> None:
    model = Trained(embedded.loaded)
    model.__dict__["heads"] = tuple(replace(layer, plain=False) for layer in embedded.heads)
    with pytest.raises(NotApplicable, match="softcap or a bias"):
        spread(model)
    assert BY_NAME["logit-moments"].check_model(model).verdict == "INCONCLUSIVE"


def test_quantiles_are_written_in_order() -> None:
    assert trained_spread.quantiles(torch.arange(11.0), 1) == "0.0/1.0/5.0/9.0/10.0"


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_the_real_models(name: str) -> None:
    folder = Path(os.environ["HEADWISE_MODELS"])
    path = next((folder / name).glob("*.gguf"), folder / name)
    model = Trained(opened(str(path), None, None, False))
    found = spread(model)
    # The medians that were measured on 512 tokens of another text, within a fifth.
    known = {"smollm2": (2.72, 0.69, 2.5), "minilm": (None, 1.19, None)}[name]
    for value, expected in zip(
        (found.std, found.std / found.isotropic, found.row_std), known, strict=True
    ):
        if expected is not None:
            assert value.median().item() == pytest.approx(expected, rel=0.2)
    assert BY_NAME["logit-variance"].check_model(model).verdict == "ASSUMPTION-VIOLATED"
    assert BY_NAME["logit-moments"].check_model(model).verdict == "HOLDS"
    assert BY_NAME["logits-within-a-row"].check_model(model).verdict == "HOLDS"
