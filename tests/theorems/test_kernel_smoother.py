"""The kernel of attention: what it is, and when it is symmetric."""

from __future__ import annotations

import math

import pytest
import torch

from headwise.circuits.factored import Factored
from headwise.theorems import kernel_smoother
from headwise.theorems.kernel_smoother import THEOREMS, _asymmetry, _negative_share

BY_NAME = {each.name: each for each in THEOREMS}


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_it_holds(name, seed):
    assert BY_NAME[name].check(seed=seed).verdict == "HOLDS"


def test_other_logits_are_noticed(monkeypatch):
    scores = kernel_smoother.scores
    monkeypatch.setattr(kernel_smoother, "scores", lambda q, k: 1.01 * scores(q, k))
    assert BY_NAME["gaussian-smoother"].check().verdict == "FAILS"


def test_a_form_that_is_not_symmetric_is_noticed(monkeypatch):
    parts = kernel_smoother._kernel_parts
    monkeypatch.setattr(
        kernel_smoother, "_kernel_parts",
        lambda x, w, scale, name: parts(x, w + torch.eye(len(w)).roll(1, 0) / 9, scale, name),
    )  # fmt: skip
    assert BY_NAME["token-kernel-symmetry"].check().verdict == "FAILS"


def test_a_check_that_ignores_the_prior_is_broken(monkeypatch):
    smoother = kernel_smoother._smoother
    monkeypatch.setattr(
        kernel_smoother, "_smoother", lambda *x, prior, width=1.0: smoother(*x, prior=True)
    )
    assert BY_NAME["gaussian-smoother"].check().verdict == "CHECK-BROKEN"


def test_sizes_of_forms_against_dense_matrices():
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(5, 23, 7, generator=generator, dtype=torch.float64) for _ in "ab")
    w = Factored(left, right.mT)
    dense = w.dense()
    norm = torch.linalg.matrix_norm
    values = torch.linalg.eigvalsh((dense + dense.mT) / 2)
    share = (-values).clamp(min=0).sum(-1) / values.abs().sum(-1)
    torch.testing.assert_close(_asymmetry(w), norm(dense - dense.mT) / norm(dense))
    torch.testing.assert_close(_negative_share(w), share)
    same = Factored(left, left.mT)
    assert float(_asymmetry(same).max()) < 1e-7
    assert float(_negative_share(same).max()) < 1e-12


def test_random_forms_are_as_far_from_symmetric_as_can_be():
    # ‖W − Wᵀ‖² = 2 ‖W‖² − 2 tr W², and tr W² is small beside ‖W‖² for factors drawn apart.
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.randn(31, 97, 13, generator=generator, dtype=torch.float64) for _ in "ab")
    found = _asymmetry(Factored(left, right.mT))
    assert float(found.mean()) == pytest.approx(math.sqrt(2), abs=0.03)


def test_figures():
    # notes: without the prior .42 off, with it 2e-16; random forms .99 asymmetric.
    evidence = BY_NAME["gaussian-smoother"].check().evidence
    assert evidence.measured[0].value < 1e-14
    assert 0.1 < evidence.controls[0].measured[0].value < 1
    apart = BY_NAME["token-kernel-symmetry"].check().evidence.controls[0].measured[0].value
    assert 0.7 < apart < 1.42
