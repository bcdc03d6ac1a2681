"""Feature maps: elu+1 digit by digit; random features unbiased, with the variance of the formula.

For w standard normal, Z = exp(w·(x + y) − (|x|² + |y|²)/2) is log-normal with σ² = |x + y|². With
ω = e^σ² its mean is e^(x·y), its variance e^(2 x·y) (ω − 1), its excess kurtosis
ω⁴ + 2ω³ + 3ω² − 6. From these come all standard errors; a check fails beyond 4 of them. For
|x + y|² above 2 the sample variance of any affordable sample lies far below the true one, so the
tests stay below.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headwise.attention import definition
from headwise.attention.feature_maps import PositiveRandomFeatures, elu_plus_one
from headwise.attention.linear import linear_attention
from headwise.errors import OptionError, ShapeError
from tests.attention.problems import rand
from tests.tolerance import UNIT, assert_close

DOUBLE = torch.float64
WIDTH = 7
DRAWS = 100_003


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair(length: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two vectors with |x + y|² = length."""
    x, y = rand(2, WIDTH, seed=seed, dtype=DOUBLE) / 2
    return x, y + (x + y) * (math.sqrt(length) / float((x + y).norm()) - 1)


def products(phi: PositiveRandomFeatures, x: Tensor, y: Tensor) -> Tensor:
    """m φ(x)_f φ(y)_f: one estimate of the kernel for every feature."""
    return phi(x) * phi(y) * len(phi.projection)


def errors_of_mean(z: Tensor, x: Tensor, y: Tensor, variance: float | None = None) -> float:
    """How many standard errors the mean of estimates lies from exp(x·y)."""
    kernel = math.exp(float(x @ y))
    if variance is None:
        variance = kernel**2 * (math.exp(float((x + y).square().sum())) - 1)
    return abs(float(z.mean()) - kernel) / math.sqrt(variance / len(z))


def errors_of_variance(z: Tensor, x: Tensor, y: Tensor) -> float:
    omega = math.exp(float((x + y).square().sum()))
    want = math.exp(2 * float(x @ y)) * (omega - 1)
    kurtosis = omega**4 + 2 * omega**3 + 3 * omega**2 - 6
    return abs(float(z.var()) / want - 1) / math.sqrt((kurtosis + 2) / len(z))


# ------------------------------------------------------------------------------------- elu + 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, DOUBLE])
def test_elu_plus_one_is_the_exponential_below_zero(dtype: torch.dtype) -> None:
    """elu(-8) + 1 in bfloat16 is 0; e^-8 is not.

    fla-org/flash-linear-attention#1261 and #1265, idiap/fast-transformers#32.
    """
    x = torch.tensor([-12.0, -8.0, -6.0, -1.0, 0.0, 2.0], dtype=dtype)
    want = torch.tensor([math.exp(t) if t < 0 else t + 1 for t in x.tolist()], dtype=DOUBLE)
    got = elu_plus_one(x)
    assert got.dtype == (DOUBLE if dtype == DOUBLE else torch.float32)
    assert_close(got, want, 0.0, 4 * UNIT[got.dtype])
    literal = torch.nn.functional.elu(x) + 1
    with pytest.raises(AssertionError):
        assert_close(literal, want, 0.0, 4 * UNIT[got.dtype])


def test_elu_plus_one_has_the_slope_of_its_formula() -> None:
    x = torch.tensor([-200.0, -3.0, 0.0, 3.0, 200.0], requires_grad=True)
    (slope,) = torch.autograd.grad(elu_plus_one(x).sum(), x)
    assert_close(slope, torch.tensor([0.0, math.exp(-3), 1.0, 1.0, 1.0]), 0.0, 4 * UNIT[x.dtype])


# ----------------------------------------------------------------------------- random features


@pytest.mark.parametrize("length", [0.1, 0.5, 1.0])
def test_independent_features_are_unbiased_with_the_variance_of_the_formula(length: float) -> None:
    x, y = pair(length)
    phi = PositiveRandomFeatures.iid(WIDTH, DRAWS, generator=generator(), scale=1.0)
    z = products(phi, x, y)
    assert errors_of_mean(z, x, y) < 4
    assert errors_of_variance(z, x, y) < 4
    assert_close((phi(x) @ phi(y))[None], z.mean()[None], 0.0, DRAWS * UNIT[DOUBLE])


def test_the_checks_of_mean_and_variance_can_fail() -> None:
    x, y = pair(0.5)
    phi = PositiveRandomFeatures.iid(WIDTH, DRAWS, generator=generator(), scale=1.0)
    longer = PositiveRandomFeatures(1.05 * phi.projection, scale=1.0)
    assert errors_of_mean(products(longer, x, y), x, y) > 4
    assert errors_of_variance(products(longer, x, y), x, y) > 4
    assert errors_of_mean(products(phi, x, -y), x, y) > 4


def estimates(kind: str, x: Tensor, y: Tensor, features: int, draws: int) -> Tensor:
    """Independent estimates of the kernel, each from its own projection."""
    source = generator(1)
    make = getattr(PositiveRandomFeatures, kind)
    out = []
    for _ in range(draws):
        phi = make(WIDTH, features, generator=source, scale=1.0)
        out.append(phi(x) @ phi(y))
    return torch.stack(out)


@pytest.mark.parametrize("features", [WIDTH, 2 * WIDTH + 3])
def test_orthogonal_features_are_unbiased_and_vary_less(features: int) -> None:
    x, y = pair(1.0)
    draws = 3001
    orthogonal = estimates("orthogonal", x, y, features, draws)
    independent = estimates("iid", x, y, features, draws)
    formula = math.exp(2 * float(x @ y)) * (math.e - 1) / features
    # Variances: the formula bounds the orthogonal one, so its standard error is on the safe side.
    assert errors_of_mean(orthogonal, x, y, formula) < 4
    assert errors_of_mean(independent, x, y, formula) < 4
    assert float(orthogonal.var()) <= float(independent.var())
    assert float(orthogonal.var()) < formula


def test_equal_lengths_would_be_biased() -> None:
    """Orthogonal rows all of length √d, a common shortcut, give another kernel."""
    x, y = pair(2.0)
    source = generator(2)
    out = []
    for _ in range(3001):
        w = PositiveRandomFeatures.orthogonal(WIDTH, WIDTH, generator=source).projection
        w = w * math.sqrt(WIDTH) / w.norm(dim=1, keepdim=True)
        phi = PositiveRandomFeatures(w, scale=1.0)
        out.append(phi(x) @ phi(y))
    z = torch.stack(out)
    assert errors_of_mean(z, x, y, float(z.var())) > 4


def test_rows_are_orthogonal_within_blocks_and_independent_draws_differ() -> None:
    w = PositiveRandomFeatures.orthogonal(WIDTH, 17, generator=generator()).projection
    for block in w.split(WIDTH):
        gram = block @ block.T
        off = gram - torch.diag(gram.diagonal())
        assert float(off.abs().max()) < 64 * WIDTH * UNIT[DOUBLE] * float(gram.max())
    independent = PositiveRandomFeatures.iid(WIDTH, 17, generator=generator()).projection
    assert float((independent @ independent.T).fill_diagonal_(0).abs().max()) > 1


@pytest.mark.parametrize("kind", ["iid", "orthogonal"])
def test_the_generator_decides_and_nothing_else(kind: str) -> None:
    make = getattr(PositiveRandomFeatures, kind)
    before = torch.random.get_rng_state()
    a, b, c = (make(WIDTH, 17, generator=generator(s)).projection for s in (3, 3, 4))
    assert a.shape == (17, WIDTH)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_default_scale_is_that_of_attention() -> None:
    """The more features, the closer to softmax attention; the error falls like m^(-1/2)."""
    q, k, v = (rand(1, 2, 13, WIDTH, seed=s, dtype=DOUBLE) / 2 for s in (1, 2, 3))
    want = definition.attention(q, k, v)

    def error(features: int, scale: float | None = None) -> float:
        phi = PositiveRandomFeatures.iid(WIDTH, features, generator=generator(), scale=scale)
        return float((linear_attention(q, k, v, phi) - want).norm())

    assert error(4096) < error(16) / 4  # 16 in expectation
    assert error(4096) < error(4096, scale=1.0) / 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    phi = PositiveRandomFeatures.iid(WIDTH, 17, generator=generator())
    x = rand(5, WIDTH).to(dtype)
    assert phi(x).dtype == torch.float32
    assert torch.equal(phi(x), phi(x.float()))
    assert (phi(x) > 0).all()


def test_bad_sizes_are_refused() -> None:
    for features, width in ((0, 3), (3, 0), (-1, 3)):
        for make in (PositiveRandomFeatures.iid, PositiveRandomFeatures.orthogonal):
            with pytest.raises(OptionError, match="both at least 1"):
                make(width, features, generator=generator())
    with pytest.raises(ShapeError, match=r"a projection of shape \(3,\)"):
        PositiveRandomFeatures(torch.zeros(3))
    for scale in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(OptionError, match="above 0 and finite"):
            PositiveRandomFeatures(torch.zeros(2, 3), scale=scale)
    phi = PositiveRandomFeatures.iid(WIDTH, 5, generator=generator())
    with pytest.raises(ShapeError, match="a last axis of 7"):
        phi(torch.zeros(2, 3))
