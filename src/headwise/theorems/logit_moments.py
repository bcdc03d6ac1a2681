"""Mean and variance of a logit when its conditions are dropped, and of a whole matrix of them."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import scores
from headwise.theorems.logit_draws import Draw, aligned, gaussian, logits, normal, shared_factor
from headwise.theorems.measured import Measured, mean_estimate
from headwise.theorems.statement import Control, Effort, Evidence, Kind, Textbook, Theorem
from headwise.theorems.trained_spread import logit_moments_of

__all__ = ["ALIGNED", "GENERAL", "GRAM", "SHARED", "general_variance"]

_RHO: Final = 0.5
_C: Final = 0.3


def general_variance(mean_q: Tensor, cov_q: Tensor, mean_k: Tensor, cov_k: Tensor) -> Tensor:
    """Var(q·k) = tr(S_q S_k) + m_qᵀ S_k m_q + m_kᵀ S_q m_k for independent q and k.

    Shapes: means ``... d``, covariances ``... d d``.

    Example:
        >>> zero, one = torch.zeros(5), torch.eye(5)
        >>> general_variance(zero, one, zero, one).item()
        5.0
    """
    first = torch.einsum("...ab,...ba->...", cov_q, cov_k)
    second = torch.einsum("...a,...ab,...b->...", mean_q, cov_k, mean_q)
    return first + second + torch.einsum("...a,...ab,...b->...", mean_k, cov_q, mean_k)


def _general(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws, pairs, d = effort.pick(31, 97), effort.pick(3001, 20011), 23
    columns: dict[str, list[float]] = {"mean": [], "variance": [], "isotropic": [], "dependent": []}
    spread = torch.logspace(-1, 0.5, d, dtype=torch.float64)
    for _ in range(draws):
        mix = gaussian(generator, 2, d, d) / math.sqrt(4 * d)
        mix_q, mix_k = mix + torch.diag(spread)
        mean_q, mean_k = gaussian(generator, 2, d) / 3
        cov_q, cov_k = mix_q.T @ mix_q, mix_k.T @ mix_k
        z, w = normal(generator, pairs, d)
        s = logits(z @ mix_q + mean_q, w @ mix_k + mean_k)
        with_q = logits(z @ mix_q + mean_q, (z + w) @ mix_k / math.sqrt(2) + mean_k)
        predicted = float(general_variance(mean_q, cov_q, mean_k, cov_k))
        square_q, square_k = (
            float(c.trace() + m @ m) for c, m in ((cov_q, mean_q), (cov_k, mean_k))
        )
        columns["mean"].append(float(s.mean() - mean_q @ mean_k) / math.sqrt(predicted / pairs))
        columns["variance"].append(float(s.var()) / predicted)
        columns["isotropic"].append(float(s.var()) / (square_q * square_k / d))
        columns["dependent"].append(float(with_q.var()) / predicted)
    mean = mean_estimate("(mean − m_q·m_k) / its standard error", columns["mean"], predicted=0.0)
    name = "variance / predicted"
    found = mean_estimate(name, columns["variance"], predicted=1.0)
    isotropic = mean_estimate(name, columns["isotropic"], predicted=1.0)
    dependent = mean_estimate(name, columns["dependent"], predicted=1.0)
    return Evidence(
        measured=(mean, found),
        controls=(
            Control(name="the isotropic formula d σ_q² σ_k²", measured=(isotropic,)),
            Control(name="k depends on q", measured=(dependent,)),
        ),
        finding=(
            f"Over {draws} random pairs of covariances and means the variance is"
            f" {found.value:.3f} of tr(S_q S_k) + m_qᵀS_k m_q + m_kᵀS_q m_k; the isotropic formula"
            f" misses by a factor {isotropic.value:.2f}."
        ),
    )


def _groups(values: Tensor, size: int, name: str, predicted: float) -> Measured:
    """Unbiased variances of groups of independent draws, relative to the prediction."""
    groups = values.view(-1, size)
    return mean_estimate(name, groups.var(1) / predicted, predicted=1.0)


def _gram(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, d = effort.pick((31, 29), (127, 61))
    groups, size = 37, 7
    name = f"variance of the mean square / predicted, n = {n}, d = {d}"
    whole, apart = [], []
    for _ in range(groups * size):
        q, k = normal(generator, n, d)
        whole.append(scores(q[None, None], k[None, None]).square().mean())
        q, k = normal(generator, n * n, d)
        apart.append(logits(q, k, None).square().mean())
    predicted = 4 / (n * d) + 2 * (1 + 1 / d) / n**2
    independent = (2 + 6 / d) / n**2
    found = _groups(torch.stack(whole), size, name, predicted)
    spread = float(torch.stack(whole).std())
    return Evidence(
        measured=(found,),
        controls=(
            Control(
                name="n² independent pairs",
                measured=(_groups(torch.stack(apart), size, name, predicted),),
            ),
            Control(
                name="the standard error of n² samples",
                measured=(_groups(torch.stack(whole), size, name, independent),),
            ),
        ),
        finding=(
            f"One {n}×{n} matrix gives the mean square of its logits with a standard deviation of"
            f" {spread:.4f} (predicted {math.sqrt(predicted):.4f}); n² independent logits would"
            f" give {math.sqrt(independent):.4f}."
        ),
    )


def _grouped(
    draw: Draw, generator: torch.Generator, groups: int, pairs: int, d: int
) -> tuple[list[float], list[float]]:
    """Mean / d and variance / d of independent groups of pairs."""
    q, k = draw(generator, groups * pairs, d)
    s = logits(q, k).view(groups, pairs)
    return (s.mean(1) / d).tolist(), (s.var(1) / d).tolist()


def _aligned(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    groups, pairs = 29, effort.pick(251, 2003)

    def both(draw: Draw, d: int) -> tuple[Measured, Measured]:
        means, variances = _grouped(draw, generator, groups, pairs, d)
        return (
            mean_estimate(f"mean / d, d = {d}", means, predicted=_RHO),
            mean_estimate(f"variance / d, d = {d}", variances, predicted=1 + _RHO**2),
        )

    found = [both(aligned(_RHO), d) for d in (17, 61, 251)]
    return Evidence(
        measured=tuple(each for pair in found for each in pair),
        controls=(Control(name="q and k independent", measured=both(normal, 61)),),
        finding=(
            f"With ρ = {_RHO} the mean is {found[-1][0].value:.3f} d_k and the variance"
            f" {found[-1][1].value:.3f} d_k at d_k = 251: the variance stays linear in d_k, the"
            " mean square does not."
        ),
    )


def _shared(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    groups, pairs = 29, effort.pick(251, 2003)

    def one(draw: Draw, d: int) -> Measured:
        _, variances = _grouped(draw, generator, groups, pairs, d)
        predicted = 1 + (d - 1) * _C**2
        return mean_estimate(f"variance / d, d = {d}", variances, predicted=predicted)

    found = [one(shared_factor(_C), d) for d in (17, 61, 251)]
    return Evidence(
        measured=tuple(found),
        controls=(
            Control(name="no common factor", measured=(one(normal, 61),)),
            Control(name="a common factor in q alone", measured=(one(shared_factor(_C, 0), 61),)),
        ),
        finding=(
            f"With correlation {_C} between coordinates the variance is {found[0].value:.2f} d_k at"
            f" d_k = 17 and {found[-1].value:.2f} d_k at 251: it grows like d_k²."
        ),
    )


GENERAL: Final = Theorem(
    name="logit-moments",
    title="Mean and variance of a logit, for any means and covariances",
    statement=(
        "For independent q and k with means m and covariances S, q·k has mean m_q·m_k and variance"
        " tr(S_q S_k) + m_qᵀ S_k m_q + m_kᵀ S_q m_k."
    ),
    latex=r"\mathrm{Var}\,\langle q,k\rangle = \mathrm{tr}(S_q S_k) + m_q^\top S_k m_q"
    r" + m_k^\top S_q m_k, \qquad \mathbb{E}\,\langle q,k\rangle = m_q^\top m_k",
    conditions=("q is independent of k",),
    source="second moments of a bilinear form; proof given",
    kind=Kind.EXPECTATION,
    prediction="the mean and the variance of the formula",
    estimator="sample moments over pairs, for random means and covariances drawn anew",
    random=_general,
    model=logit_moments_of,
    textbook=(
        Textbook(
            "comparing the formula with a trained head tests it",
            "over all n² pairs of a head that sees everything it is an identity; it is an"
            " approximation only under a causal mask",
        ),
    ),
    proof="logit-variance",
)

GRAM: Final = Theorem(
    name="logits-of-one-matrix",
    title="The n² logits of one matrix are not n² samples",
    statement=(
        "For standard normal q and k the mean square of the n² scaled logits of one matrix has"
        " relative variance 4/(n d_k) + 2(1 + 1/d_k)/n², not (2 + 6/d_k)/n²."
    ),
    latex=r"\mathrm{Var}\left(\frac{1}{n^2}\sum_{ij} s_{ij}^2\right) ="
    r" \frac{4}{n d_k} + \frac{2}{n^2}\left(1 + \frac{1}{d_k}\right)",
    conditions=("q and k are standard normal", "all n queries meet the same n keys"),
    source="moments of a Gaussian bilinear form; proof given",
    kind=Kind.EXPECTATION,
    prediction="the variance of the formula",
    estimator="unbiased variance of groups of independent matrices, averaged over the groups",
    random=_gram,
    proof="logits-of-one-matrix",
)

ALIGNED: Final = Theorem(
    name="correlated-queries-and-keys",
    title="Correlated q and k shift the mean of the logits, not the power of their variance",
    statement=(
        "When each coordinate of k has correlation ρ with that of q (both normal), q·k has mean"
        " ρ d_k σ² and variance d_k σ⁴ (1 + ρ²)."
    ),
    latex=r"\mathbb{E}\,\langle q,k\rangle = \rho d_k \sigma^2, \qquad"
    r" \mathrm{Var}\,\langle q,k\rangle = d_k \sigma^4 (1 + \rho^2)",
    conditions=("q and k are jointly normal", "the correlation is ρ in every coordinate"),
    source="Isserlis's theorem; proof given",
    kind=Kind.EXPECTATION,
    prediction="mean/d_k = 0.5 and variance/d_k = 1.25 at ρ = 0.5",
    estimator="means and variances of independent groups of pairs",
    random=_aligned,
    textbook=(
        Textbook(
            "when q and k are correlated the variance of the logits grows like d_k²",
            "their mean square does; the variance stays d_k σ⁴ (1 + ρ²)",
        ),
    ),
    proof="correlated-queries-and-keys",
)

SHARED: Final = Theorem(
    name="correlated-coordinates",
    title="Correlated coordinates make the variance grow like d_k²",
    statement=(
        "When the coordinates of q have correlation c with each other, and those of k too, q·k has"
        " variance σ⁴ (d_k + d_k(d_k − 1) c²). In q alone the correlation changes nothing."
    ),
    latex=r"\mathrm{Var}\,\langle q,k\rangle = \sigma^4\left(d_k + d_k (d_k - 1) c^2\right)",
    conditions=("coordinates are correlated within q", "coordinates are correlated within k"),
    source="the general formula with S_q = S_k = (1 − c) I + c 11ᵀ",
    kind=Kind.EXPECTATION,
    prediction="variance/d_k = 1 + (d_k − 1) c² at c = 0.3",
    estimator="variances of independent groups of pairs",
    random=_shared,
    proof="correlated-queries-and-keys",
)
