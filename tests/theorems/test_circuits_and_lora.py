"""Other factors of W_QK, and the directions of updates beside those of noise."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn import functional

from headwise.models import build, preset
from headwise.observation.loading import wrap_model
from headwise.observation.run import opened
from headwise.theorems import circuits_and_lora, fine_tuning, low_rank_updates
from headwise.theorems.fine_tuning import noise_energy
from headwise.theorems.trained import Trained
from tests.theorems.models import loaded_model

BY_NAME = {each.name: each for each in circuits_and_lora.THEOREMS}
QK, NULL = BY_NAME["qk-refactoring"], BY_NAME["update-noise-null"]
TUNING = BY_NAME["fine-tuning-update-rank"]


@pytest.fixture(scope="module")
def embedded():
    return Trained(opened(None, None, None, False))


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", ["qk-refactoring", "update-noise-null"])
def test_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


def test_fine_tuning_is_concentrated():
    evidence = TUNING.check().evidence
    assert TUNING.check().verdict == "HOLDS"
    descent, adam, rank, adapter = evidence.measured
    assert descent.value > adam.value > 1.5 * noise_energy(8, 67, 70)
    assert (rank.value, adapter.value) == (67, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_fine_tuning_on_other_seeds(seed):
    assert TUNING.check(seed=seed).verdict == "HOLDS"


# -- the checks can fail ----------------------------------------------------------------------


def test_entries_that_have_a_meaning_of_their_own_are_noticed(monkeypatch):
    module = sys.modules["headwise.models.attention"]
    right = module.split_heads
    monkeypatch.setattr(module, "split_heads", lambda x, heads: functional.relu(right(x, heads)))
    assert QK.check().verdict == "FAILS"


def test_factors_of_another_product_are_noticed(monkeypatch):
    right = circuits_and_lora.Factored.svd

    def wrong(self, k=None):
        u, s, v = right(self, k)
        return u, s * (1 + 1e-6), v

    monkeypatch.setattr(circuits_and_lora.Factored, "svd", wrong)
    assert QK.check().verdict == "FAILS"


def test_a_wrong_null_of_similarity_is_noticed(monkeypatch):
    right = low_rank_updates.similarity_null
    monkeypatch.setattr(low_rank_updates, "similarity_null", lambda r, d: right(r, d) * 1.2)
    assert NULL.check().verdict == "FAILS"


def test_a_wrong_law_of_noise_is_noticed(monkeypatch):
    monkeypatch.setattr(low_rank_updates, "noise_energy", lambda r, d, e: r / min(d, e))
    assert NULL.check().verdict == "FAILS"


def test_a_wrong_amplification_is_noticed(monkeypatch):
    change = sys.modules["headwise.circuits.change"].Change
    right = change.amplification
    monkeypatch.setattr(change, "amplification", lambda self, r: right(self, r) ** 2)
    assert NULL.check().verdict == "FAILS"


def test_updates_of_noise_are_noticed(monkeypatch):
    right = fine_tuning._tuned

    def noisy(seed, steps):
        found = right(seed, 1)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(found.base.shape, generator=generator, dtype=torch.float64)
        return fine_tuning._Tuned(found.base, noise, noise, found.adapter)

    monkeypatch.setattr(fine_tuning, "_tuned", noisy)
    assert TUNING.check().verdict == "FAILS"


# -- the law ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rank", "rows", "columns"), [(5, 307, 211), (31, 211, 307), (101, 211, 211)]
)
def test_law_of_noise_beside_draws(rank, rows, columns):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5, rows, columns, generator=generator, dtype=torch.float64)
    squares = torch.linalg.svdvals(noise).square()
    share = (squares[:, :rank].sum(1) / squares.sum(1)).mean()
    assert noise_energy(rank, rows, columns) == pytest.approx(float(share), rel=0.03)


def test_law_has_all_energy_in_all_directions():
    assert noise_energy(210, 211, 307) == pytest.approx(1.0, abs=2e-3)
    assert noise_energy(211, 211, 307) == 1.0


# -- models -----------------------------------------------------------------------------------


def test_embedded_model_turns_between_the_factors(embedded):
    outcome = QK.check_model(embedded)
    assert outcome.verdict == "ASSUMPTION-VIOLATED"
    assert "W_Q R_Δ W_Kᵀ" in outcome.evidence.violated


def test_one_step_on_the_embedded_model(embedded):
    asked = [p.requires_grad for p in embedded.model.parameters()]
    outcome = TUNING.check_model(embedded)
    assert outcome.verdict == "HOLDS"
    assert outcome.evidence.measured[0].value > 0.9
    assert [p.requires_grad for p in embedded.model.parameters()] == asked
    assert all(p.grad is None for p in embedded.model.parameters())


def test_an_encoder_is_refactored_and_has_no_loss():
    ids = torch.randint(97, (71,), generator=torch.Generator().manual_seed(3)).tolist()
    model = build(preset("tiny-encoder"))
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "query" in name or "key" in name:
                x.normal_(0, 0.2, generator=torch.Generator().manual_seed(5))
    trained = Trained(wrap_model(model, name="tiny"), ids)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    assert QK.check_model(trained).verdict == "HOLDS"
    assert TUNING.check_model(trained).verdict == "INCONCLUSIVE"
    assert all(torch.equal(x, model.state_dict()[key]) for key, x in before.items())


@pytest.mark.real_model
def test_real_models():
    smollm2, minilm = loaded_model("smollm2"), loaded_model("minilm")
    assert QK.check_model(smollm2).verdict == "INCONCLUSIVE"  # shared keys
    assert QK.check_model(minilm).verdict == "HOLDS"
    assert TUNING.check_model(smollm2).verdict == "HOLDS"
    assert TUNING.check_model(minilm).verdict == "INCONCLUSIVE"
