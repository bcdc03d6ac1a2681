"""A product as its factors gives what dense float64 algebra gives."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.circuits import factored
from headwise.circuits.factored import Factored, in_pieces, triangle
from headwise.errors import OptionError, ShapeError

F64 = torch.float64
CLOSE = 1e-12  # of the largest value: the bound of the Cholesky way


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def product(*batch: int, d: int = 13, r: int = 5, e: int = 11, seed: int = 0) -> Factored:
    return Factored(draw(*batch, d, r, seed=seed), draw(*batch, r, e, seed=seed + 1))


def padded(values: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, size - values.shape[-1]))


@pytest.mark.parametrize(("d", "r", "e"), [(13, 5, 11), (11, 5, 13), (3, 5, 11), (7, 5, 2)])
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16])
def test_singular_values_and_norm(d: int, r: int, e: int, dtype: torch.dtype) -> None:
    w = Factored(draw(2, 3, d, r, dtype=dtype), draw(2, 3, r, e, seed=1, dtype=dtype))
    dense = w.left.double() @ w.right.double()
    want = torch.linalg.svdvals(dense)
    got = w.singular_values()
    assert got.dtype == F64
    assert got.shape == (2, 3, min(d, r, e))
    assert (padded(got, want.shape[-1]) - want).abs().max() < CLOSE * want.max()
    torch.testing.assert_close(w.norm(), dense.norm(dim=(-2, -1)), rtol=CLOSE, atol=0)
    assert w.shape == dense.shape


def test_norms_do_not_survive_a_cyclic_exchange() -> None:
    """The error in a published figure: ‖left · right‖ is not ‖right · left‖, the trace is."""
    w = product(3, d=13, e=13)
    small = w.right @ w.left
    torch.testing.assert_close(w.trace(), small.diagonal(dim1=-2, dim2=-1).sum(-1))
    torch.testing.assert_close(w.norm(), w.dense().norm(dim=(-2, -1)))
    assert ((small.norm(dim=(-2, -1)) / w.norm() - 1).abs() > 0.05).all()


def test_eigenvalues_are_those_of_the_dense_product() -> None:
    w = product(2, d=13, e=13)
    got = w.eigenvalues()
    for member, dense in zip(got, w.dense(), strict=True):
        want = torch.linalg.eigvals(dense)
        largest = want[want.abs().argsort(descending=True)[:5]]
        distance = (member[:, None] - largest[None]).abs()
        assert distance.min(0).values.max() < 1e-10
        assert distance.min(1).values.max() < 1e-10
    with pytest.raises(ShapeError, match="eigenvalues of a 13×11"):
        product().eigenvalues()


def test_directions_rebuild_the_product_and_cut_it_best() -> None:
    w = product(2, 3)
    u, s, v = w.svd()
    torch.testing.assert_close(u * s[..., None, :] @ v, w.dense())
    torch.testing.assert_close(u.mT @ u, torch.eye(5, dtype=F64).expand(2, 3, 5, 5))
    torch.testing.assert_close(v @ v.mT, torch.eye(5, dtype=F64).expand(2, 3, 5, 5))
    u, s, v = w.svd(k=2)
    rest = w.dense() - u * s[..., None, :] @ v
    want = torch.linalg.svdvals(w.dense())[..., 2:].square().sum(-1).sqrt()
    torch.testing.assert_close(rest.norm(dim=(-2, -1)), want)
    for k in (0, 6):
        with pytest.raises(OptionError, match="1 to 5"):
            w.svd(k=k)


def test_ranks() -> None:
    u, v = (torch.linalg.qr(draw(13, 4, seed=s)).Q for s in (1, 2))
    sigma = torch.tensor([4.0, 2.0, 2.0, 0.0], dtype=F64)
    w = Factored(u * sigma, v.T)
    share = [0.5, 0.25, 0.25]
    assert math.isclose(w.effective_rank().item(), math.exp(-sum(p * math.log(p) for p in share)))
    assert math.isclose(w.stable_rank().item(), 24 / 16)
    assert w.numerical_rank().item() == 3
    assert w.parameters() == 4 * (26 - 4)
    zero = Factored(torch.zeros(13, 4), torch.zeros(4, 13))
    ranks = (zero.effective_rank(), zero.stable_rank(), zero.numerical_rank())
    assert [rank.item() for rank in ranks] == [0, 0, 0]


@pytest.mark.parametrize("condition", [1e2, 1e3, 1e6, 1e12, math.inf])
def test_ill_conditioned_factors(condition: float) -> None:
    """Both ways of finding R, and the rank of a product whose factors are both of full rank."""
    u, v = (torch.linalg.qr(draw(101, 7, seed=s)).Q for s in (1, 2))
    sigma = torch.logspace(0, -math.log10(condition), 7, dtype=F64) if condition < math.inf else 0
    left = u * sigma @ torch.linalg.qr(draw(7, 7, seed=3)).Q
    w = Factored(left, v.T)
    want = torch.linalg.svdvals(left @ v.T)[:7]
    assert (w.singular_values() - want).abs().max() <= CLOSE * max(want.max().item(), 1e-300)
    assert w.numerical_rank().item() == (7 if condition < math.inf else 0)


def test_a_zero_singular_value_between_full_factors_is_found() -> None:
    """left and right have rank 7 and condition 10³; one direction of the product is missing."""
    u, v = (torch.linalg.qr(draw(101, 9, seed=s)).Q for s in (1, 2))
    middle = torch.linalg.qr(draw(9, 9, seed=3)).Q
    scales = torch.logspace(0, -3, 9, dtype=F64)
    left = u * scales @ middle[:, :9]
    right = torch.cat((middle[:, 1:8], torch.zeros(9, 1, dtype=F64)), 1).mT  # misses two directions
    w = Factored(left, right.mT @ v[:, :8].T)
    assert w.numerical_rank().item() == 7


def test_the_cheap_way_alone_would_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    u = torch.linalg.qr(draw(101, 7)).Q
    left = u * torch.logspace(0, -9, 7, dtype=F64) @ torch.linalg.qr(draw(7, 7, seed=3)).Q
    want = torch.linalg.svdvals(left)

    def error() -> float:
        return (torch.linalg.svdvals(triangle(left)) - want).abs().max().item()

    assert error() < 1e-15
    monkeypatch.setattr(factored.triangle, "__defaults__", (math.inf,))
    assert error() > 1e-13 or not math.isfinite(error())


def test_algebra() -> None:
    a, b = product(3, d=13, r=5, e=11), product(3, d=11, r=2, e=13, seed=7)
    torch.testing.assert_close((a @ b).dense(), a.dense() @ b.dense())
    torch.testing.assert_close((b @ a).dense(), b.dense() @ a.dense())
    assert (a @ b).rank == (b @ a).rank == 2
    torch.testing.assert_close(a.T.dense(), a.dense().mT)
    m, n = draw(11, 3, seed=5), draw(3, 13, seed=6)
    torch.testing.assert_close((a @ m).dense(), a.dense() @ m)
    torch.testing.assert_close((n @ a).dense(), n @ a.dense())
    for wrong in (lambda: a @ a, lambda: a @ n, lambda: m @ a):
        with pytest.raises(ShapeError, match="equal widths"):
            wrong()


def test_batch_axes() -> None:
    w = product(2, 3)
    torch.testing.assert_close(w[1, 2].dense(), w.dense()[1, 2])
    torch.testing.assert_close(w[..., :2].dense(), w.dense()[:, :2])
    torch.testing.assert_close(w[torch.tensor([1, 0])].dense(), w.dense()[[1, 0]])
    with pytest.raises(ShapeError, match="3 indices"):
        w[0, 0, 0]
    shared = Factored(draw(3, 13, 5), draw(5, 11))
    assert shared.batch == (3,)
    assert shared.right.stride(0) == 0  # not copied
    for left, right in ((draw(3, 13, 5), draw(2, 5, 11)), (draw(13, 5), draw(4, 11))):
        with pytest.raises(ShapeError):
            Factored(left, right)
    with pytest.raises(ShapeError, match="real left"):
        Factored(torch.ones(3, 2, dtype=torch.int64), torch.ones(2, 3))


@pytest.mark.parametrize("most", [1, 1000, 10**9])
@pytest.mark.parametrize("shape", [(5, 7), (3, 5, 7), (1, 3, 5, 7), (2, 3, 5, 7)])
def test_pieces_make_no_difference(most: int, shape: tuple[int, ...]) -> None:
    x = draw(*shape)
    for function in (lambda a: a.mT @ a, lambda a: a.sum((-2, -1))):
        torch.testing.assert_close(in_pieces(function, x, most=most), function(x))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_stays_where_it_is(value: float) -> None:
    w = product(3, d=13, e=13)
    want = w.singular_values()
    w.left[1, 2, 3] = value
    got = (w.singular_values(), w.eigenvalues().abs(), w.svd().values, w.norm()[:, None])
    for values in got:
        assert values[1].isnan().all()
        assert values[[0, 2]].isfinite().all()
    torch.testing.assert_close(got[0][[0, 2]], want[[0, 2]])
    assert w.numerical_rank().tolist() == [5, -1, 5]
