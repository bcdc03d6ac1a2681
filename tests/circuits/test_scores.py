"""Scores of a head against eigenvalues of the dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.circuits.factored import Factored
from headwise.circuits.scores import kernel, sign_score, sign_spread, vocabulary_map
from headwise.errors import OptionError, ShapeError
from tests.circuits.test_factored import draw, product

VOCAB, D, R = 37, 13, 5


def dense_score(matrix: Tensor) -> Tensor:
    values = torch.linalg.eigvals(matrix)
    return values.sum(-1).real / values.abs().sum(-1)


@pytest.mark.parametrize("memory", [1, 10_000, 10**9])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("with_gain", [False, True])
def test_copying_is_that_of_the_whole_vocabulary(
    memory: int, centred: bool, with_gain: bool
) -> None:
    embedding, unembedding = draw(VOCAB, D, seed=2), draw(D, VOCAB, seed=3)
    gain = draw(D, seed=4) if with_gain else None
    ov = product(2, 3, d=D, r=R, e=D)
    centring = torch.eye(D, dtype=torch.float64) - (1 / D if centred else 0)
    folded = centring * (1 if gain is None else gain) @ unembedding
    want = dense_score(embedding @ ov.dense() @ folded)
    back = vocabulary_map(embedding, unembedding, gain=gain, centred=centred, memory=memory)
    torch.testing.assert_close(back, folded @ embedding)
    torch.testing.assert_close(sign_score(ov, back), want, rtol=0, atol=1e-11)


def test_a_planted_copying_head_scores_1_and_its_opposite_minus_1() -> None:
    embedding, value = draw(VOCAB, D, seed=2), draw(D, R, seed=5)
    back = vocabulary_map(embedding, embedding.T)
    torch.testing.assert_close(sign_score(Factored(value, value.T), back).item(), 1.0)
    torch.testing.assert_close(sign_score(Factored(value, -value.T), back).item(), -1.0)
    other = sign_score(Factored(value, draw(R, D, seed=6)), back).item()
    assert abs(other) < 0.95


def test_sign_score_of_query_and_key() -> None:
    qk = product(3, d=D, r=R, e=D)
    torch.testing.assert_close(sign_score(qk), dense_score(qk.dense()), rtol=0, atol=1e-11)
    with pytest.raises(ShapeError, match=r"map \(12, 13\)"):
        sign_score(qk, draw(12, 13))
    with pytest.raises(ShapeError, match="vocab, d_model"):
        vocabulary_map(draw(VOCAB, D), draw(VOCAB, D))


def test_spread_of_random_heads() -> None:
    """Published spreads .20, .054 and .028 at ranks 8, 32 and 64 (their own error is some 10%)."""
    for rank, want in ((8, 0.20), (32, 0.054)):
        assert math.isclose(sign_spread(128, rank, draws=100), want, rel_tol=0.3)
    assert sign_spread(D, R, draws=50) == sign_spread(D, R, draws=50)
    assert sign_spread(D, R, draws=50) != sign_spread(D, R, draws=50, seed=1)
    one_way = torch.zeros(D, D, dtype=torch.float64)
    one_way[0, 0] = 1.0  # a single eigenvalue: every score is 1 or −1
    assert math.isclose(sign_spread(D, R, one_way, draws=5), 1.0, rel_tol=1e-9)
    with pytest.raises(OptionError):
        sign_spread(D, R, draws=1)


@pytest.mark.parametrize(("d", "r"), [(13, 5), (13, 11), (7, 7)])
def test_kernel_against_dense(d: int, r: int) -> None:
    qk = product(2, 3, d=d, r=r, e=d)
    dense = qk.dense()
    half = (dense + dense.mT) / 2
    values = torch.linalg.eigvalsh(half)
    got = kernel(qk)
    share = half.square().sum((-2, -1)) / dense.square().sum((-2, -1))
    torch.testing.assert_close(got.symmetric, share)
    negative = -values.clamp_max(0).sum(-1) / values.abs().sum(-1)
    torch.testing.assert_close(got.negative, negative, rtol=0, atol=1e-11)


def test_kernels_known_beforehand() -> None:
    left, right = draw(D, R), draw(R, D, seed=1)
    same = kernel(Factored(left, left.T))
    torch.testing.assert_close([same.symmetric.item(), same.negative.item()], [1.0, 0.0])
    turned = kernel(Factored(torch.cat((left, right.T), 1), torch.cat((right, -left.T))))
    torch.testing.assert_close(turned.symmetric.item(), 0.0, rtol=0, atol=1e-12)
    worst = kernel(Factored(left, -left.T))
    torch.testing.assert_close([worst.symmetric.item(), worst.negative.item()], [1.0, 1.0])
    zero = kernel(Factored(left * 0, right))
    assert zero.symmetric.isnan()
    assert zero.negative.isnan()


def test_kernel_of_random_heads() -> None:
    """Symmetric share 1/2 + 1/(2d), negative mass 1/2, both within four standard errors."""
    qk = product(400, d=D, r=R, e=D)
    got = kernel(qk)
    for values, want in ((got.symmetric, 0.5 + 0.5 / D), (got.negative, 0.5)):
        assert abs(values.mean().item() - want) < 4 * values.std().item() / 20 + 0.2 / D


def test_not_finite_heads_are_nan_alone() -> None:
    qk = product(3, d=D, r=R, e=D)
    qk.left[1, 0, 0] = math.nan
    got = kernel(qk)
    for values in (got.symmetric, got.negative, sign_score(qk), sign_score(qk, draw(D, D))):
        assert values.isnan().tolist() == [False, True, False]
