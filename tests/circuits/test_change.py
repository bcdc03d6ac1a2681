"""What is said of a change equals the dense algebra, and each number can be another."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.circuits.change import Change, similarity_null, subspace_similarity
from headwise.circuits.factored import Factored
from headwise.errors import OptionError, ShapeError

HEADS, D, R = 3, 23, 5
# An SVD of d×d float64 numbers is exact for a matrix that differs by a few d·u·‖W‖; 16 as in
# tests/tolerance.py. Angles between directions are that over the gap of the singular values, which
# is above 1/64 of ‖W‖ for every matrix drawn here.
ROUNDING = 16 * D * 2.0**-53
ANGLES = 64 * ROUNDING


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def factored(rank: int, seed: int, d: int = D) -> Factored:
    return Factored(draw(HEADS, d, rank, seed=seed), draw(HEADS, rank, d, seed=seed + 1))


def test_sizes_energies_and_amplification_are_those_of_the_dense_matrices():
    change, base = factored(4, 0), factored(R, 2)
    found = Change(change, base, torch.zeros(HEADS))
    dense, whole = change.dense(), base.dense()
    u, s, v = torch.linalg.svd(dense)
    norm = torch.linalg.matrix_norm(dense)
    torch.testing.assert_close(found.norm(), norm, rtol=ROUNDING, atol=0)
    want = norm / torch.linalg.matrix_norm(whole)
    torch.testing.assert_close(found.relative(), want, rtol=2 * ROUNDING, atol=0)
    assert found.rank().tolist() == [4] * HEADS
    for r in (1, 2, 4):
        energy = s[:, :r].square().sum(-1) / s.square().sum(-1)
        torch.testing.assert_close(found.energy(r), energy, rtol=4 * ROUNDING, atol=0)
        inner = u[:, :, :r].mT @ whole @ v[:, :r].mT
        factor = norm / torch.linalg.matrix_norm(inner)
        torch.testing.assert_close(found.amplification(r), factor, rtol=D * ANGLES, atol=0)
    # ΔW against W, not against itself: by its own directions the factor would be 1
    assert not torch.isclose(found.amplification(4), torch.ones(HEADS).double(), rtol=0.1).any()
    itself = Change(change, change, torch.zeros(HEADS)).amplification(4)
    torch.testing.assert_close(itself, torch.ones(HEADS).double(), rtol=ANGLES, atol=0)


def test_noise_is_no_rank_and_no_change_has_no_share():
    change = Factored(
        torch.diag(torch.tensor([1.0, 1e-3, 1e-9]).double())[None], torch.eye(3)[None]
    )
    assert Change(change, change, torch.tensor([0.0])).rank().item() == 3
    assert Change(change, change, torch.tensor([1e-6])).rank().item() == 2
    nothing = Factored(torch.zeros(1, 3, 2), torch.ones(1, 2, 3))
    found = Change(nothing, change, torch.zeros(1))
    assert found.rank().item() == 0
    assert found.norm().item() == found.relative().item() == 0
    assert found.energy(1).isnan().all()
    assert found.amplification(1).isnan().all()


@pytest.mark.parametrize("side", ["left", "right"])
def test_similarity_is_the_overlap_of_the_dense_singular_directions(side):
    a, b = factored(4, 0), factored(3, 7)
    phi = subspace_similarity(a, b, rank=3, side=side)
    ua, _, va = torch.linalg.svd(a.dense())
    ub, _, vb = torch.linalg.svd(b.dense())
    x, y = (ua, ub) if side == "left" else (va.mT, vb.mT)
    for i in (1, 2, 3):
        for j in (1, 2, 3):
            want = (x[..., :i].mT @ y[..., :j]).square().sum((-2, -1)) / min(i, j)
            torch.testing.assert_close(phi[:, i - 1, j - 1], want, rtol=0, atol=D * ANGLES)
    same = subspace_similarity(a, a, rank=4, side=side)
    torch.testing.assert_close(same, torch.ones_like(same), rtol=0, atol=ANGLES)


def test_random_subspaces_meet_the_null_and_shared_ones_do_not():
    draws, d, rank = 211, 37, 3
    a = Factored(draw(draws, d, rank, seed=1), draw(draws, rank, d, seed=2))
    b = Factored(draw(draws, d, rank, seed=3), draw(draws, rank, d, seed=4))
    phi, null = subspace_similarity(a, b, rank=rank), similarity_null(rank, d)
    # 4 standard errors of the mean, estimated from the draws, for 9 cells
    error = phi.std(0) / math.sqrt(draws)
    assert ((phi.mean(0) - null).abs() < 4 * error).all()
    shared = Factored(a.left + 0.1 * b.left, b.right)
    assert (subspace_similarity(a, shared, rank=rank).mean(0)[2, 2] - null[2, 2]) > 100 * error[
        2, 2
    ]
    assert null[0, 2] == null[2, 0] == 3 / d  # the larger of the two


def test_directions_that_a_change_lacks_are_not_compared():
    narrow = factored(2, 0)
    wide = Factored(torch.cat((narrow.left, 0 * narrow.left), -1), factored(4, 5).right)
    phi = subspace_similarity(wide, factored(4, 9), rank=3)
    assert phi[:, :2].isfinite().all()
    assert phi[:, 2].isnan().all()


def test_what_cannot_be_asked():
    found = Change(factored(4, 0), factored(R, 2), torch.zeros(HEADS))
    for r in (0, 5):
        for ask in (found.energy, found.amplification):
            with pytest.raises(OptionError, match=f"the rank is {r}; allowed: 1 to 4"):
                ask(r)
    with pytest.raises(OptionError, match="allowed: 1 to 3"):
        subspace_similarity(factored(4, 0), factored(3, 1), rank=4)
    with pytest.raises(ShapeError, match="changes of 23 and 29 numbers on the left"):
        subspace_similarity(factored(4, 0), factored(3, 1, d=29), rank=2)
