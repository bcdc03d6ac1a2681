"""Composition of all pairs against dense products, and its null against random heads."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from headwise.circuits.composition import Composition, composition, extra_bytes
from headwise.circuits.factored import Factored
from headwise.errors import OptionError, ShapeError
from tests.circuits.test_factored import draw

D = 23


def stack(heads: list[int], ranks: list[int], d: int = D, seed: int = 0) -> list[Factored]:
    return [
        Factored(draw(h, d, r, seed=seed + 2 * i), draw(h, r, d, seed=seed + 2 * i + 1))
        for i, (h, r) in enumerate(zip(heads, ranks, strict=True))
    ]


def dense(writers: list[Factored], readers: list[Factored]) -> torch.Tensor:
    wide = [[m for f in side for m in f.dense()] for side in (writers, readers)]
    return torch.tensor(
        [[(a @ b).norm() / (a.norm() * b.norm()) for b in wide[1]] for a in wide[0]]
    ).double()


@pytest.mark.parametrize("memory", [60_000, 10**8])
def test_against_dense_products(memory: int) -> None:
    """Layers of different heads and ranks; small and large tiles."""
    writers = stack([2, 3, 1, 2, 3, 2, 1], [5, 3, 2, 5, 3, 7, 1])
    readers = stack([3, 1, 2, 2, 1, 2, 3], [3, 2, 5, 1, 7, 3, 2], seed=100)
    got = composition(writers, readers, memory=memory)
    want = dense(writers, readers)
    assert got.value.shape == (14, 14)
    for a, b in product(range(14), range(14)):
        if got.reader_layer[b] > got.writer_layer[a]:
            assert abs(got.value[a, b] - want[a, b]) < 1e-6 * want[a, b]
        else:
            assert got.value[a, b].isnan()
            assert got.z[a, b].isnan()


def test_norms_are_not_taken_of_exchanged_factors() -> None:
    """The published mistake: ‖A B‖ replaced by the norm of the small matrix that has its trace."""
    one, two = stack([1], [5])[0], stack([1], [5], seed=50)[0]
    right = composition([one, one], [two, two]).value[0, 1:]
    small = (two.right @ one.left) @ (one.right @ two.left)
    wrong = small.norm() / (one.norm() * two.norm())
    dense_way = (one.dense() @ two.dense()).norm() / (one.norm() * two.norm())
    torch.testing.assert_close(right, dense_way)
    assert abs(wrong / right - 1) > 0.05


def test_planted_and_forbidden_composition() -> None:
    basis = torch.linalg.qr(draw(D, 6)).Q
    writes = Factored(draw(1, D, 1), basis[None, :, :1].mT)
    reads = Factored(basis[None, :, :1], draw(1, 1, D, seed=3))
    deaf = Factored(basis[None, :, 1:2], draw(1, 1, D, seed=3))
    got = composition([writes, writes], [reads, reads])
    assert math.isclose(got.value[0, 1].item(), 1.0, rel_tol=1e-9)
    assert got.z[0, 1] > 5
    assert got.tail[0, 1] < 1e-3
    assert composition([writes, writes], [deaf, deaf]).value[0, 1] < 1e-7


@pytest.mark.parametrize(("d", "rank"), [(23, 1), (23, 5), (64, 8)])
def test_null_of_gaussian_heads(d: int, rank: int) -> None:
    """Mean of c² is 1/d, z has mean 0 and variance 1; published: .1228 ± .012 at (64, 8)."""
    n = 300
    left, right = stack([n], [rank], d)[0], stack([n], [rank], d, seed=9)[0]
    got = composition([left, left], [right, right])
    z, value = [both.diagonal() for both in (got.z[:n, n:], got.value[:n, n:])]
    assert abs(z.mean()) < 4 / math.sqrt(n)
    fourth = ((z - z.mean()) ** 4).mean()
    assert abs(z.var() - 1) < 4 * ((fourth - 1).clamp_min(0) / n).sqrt() + 0.05
    assert abs(value.square().mean() * d - 1) < 4 * (value.square().std() * d) / math.sqrt(n)
    if (d, rank) == (64, 8):
        assert abs(value.mean() - 0.1228) < 4 * 0.012 / math.sqrt(n)
        assert 0.009 < value.std() < 0.015
    tail = got.tail[:n, n:].diagonal()
    assert abs((tail < 0.1).double().mean() - 0.1) < 4 * math.sqrt(0.09 / n) + 0.02


def test_memory_is_bounded_and_foretold() -> None:
    heads = stack([8] * 4, [16] * 4, d=128)
    with pytest.raises(OptionError, match="MiB or more"):
        composition(heads, heads, memory=1000)
    assert extra_bytes(heads, heads, 8) < extra_bytes(heads, heads, 64)
    wide = Factored(
        torch.empty(1, 1, 1).expand(32, 4096, 128), torch.empty(1, 1, 1).expand(32, 128, 4096)
    )
    assert extra_bytes([wide] * 32, [wide] * 32) < 2 * 2**30


def test_what_does_not_fit() -> None:
    heads = stack([2, 2], [3, 3])
    for writers, readers in ((heads, heads[:1]), (heads, stack([2, 2], [3, 3], d=7)), ([], [])):
        with pytest.raises(ShapeError):
            composition(writers, readers)


def test_a_head_that_is_not_finite_is_nan_alone() -> None:
    heads = stack([2, 2, 2], [3, 3, 3])
    want = composition(heads, heads).value
    heads[0].left[1, 0, 0] = math.nan
    got: Composition = composition(heads, heads)
    assert got.value[1].isnan().all()
    torch.testing.assert_close(got.value[0], want[0], equal_nan=True)
    torch.testing.assert_close(got.value[2:], want[2:], equal_nan=True)
