"""Laws of a head's products: what survives a change of basis inside the head, and what does not."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headwise.circuits.factored import Factored
from headwise.circuits.rotary import spectra
from headwise.circuits.scores import kernel, sign_score
from headwise.positions.layout import Layout

D, R = 13, 6
TURNS = SimpleNamespace(
    inv_freq=torch.tensor([1.0, 0.3, 0.01]).double(), width=R, layout=Layout.HALF, factor=1.0
)
OFFSETS = torch.tensor([0, -1, -7])
few = settings(max_examples=25, deadline=None)


def parts(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """W_Q, W_K, and a well-conditioned change of basis M."""
    generator = torch.Generator().manual_seed(seed)
    query, key = torch.randn(2, 2, D, R, generator=generator, dtype=torch.float64)
    mix = torch.randn(R, R, generator=generator, dtype=torch.float64)
    return query, key, torch.linalg.matrix_exp(mix / 4)


def values(query: Tensor, key: Tensor) -> list[Tensor]:
    w = Factored(query, key.mT)
    k = kernel(w)
    return [w.singular_values(), w.trace(), sign_score(w), k.symmetric, k.negative]


@given(st.integers(0, 10**6))
@few
def test_the_basis_inside_a_head_is_free_without_rotary(seed: int) -> None:
    query, key, mix = parts(seed)
    changed = values(query @ mix, key @ torch.linalg.inv(mix).T)
    for got, want in zip(changed, values(query, key), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)


@given(st.integers(0, 10**6))
@few
def test_with_rotary_only_what_commutes_with_the_turns_is_free(seed: int) -> None:
    query, key, mix = parts(seed)
    before = spectra(query, key, TURNS, OFFSETS)
    after = spectra(query @ mix, key @ torch.linalg.inv(mix).T, TURNS, OFFSETS)
    torch.testing.assert_close(after[0], before[0], rtol=1e-8, atol=1e-8)  # Δ = 0
    assert (after[1:] - before[1:]).abs().max() > 1e-3  # the control
    turn = torch.polar(mix[0, :3].exp(), mix[1, :3])  # a scaled rotation of every pair
    block = torch.cat(
        (
            torch.cat((turn.real.diag(), turn.imag.diag()), 1),
            torch.cat((-turn.imag.diag(), turn.real.diag()), 1),
        )
    )
    same = spectra(query @ block, key @ torch.linalg.inv(block).T, TURNS, OFFSETS)
    torch.testing.assert_close(same, before, rtol=1e-8, atol=1e-8)
