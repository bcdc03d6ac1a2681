"""What random features of the softmax kernel are expected to do, and how it is measured.

For x' = √scale x: SM = exp(x'·y') is the kernel, s = |x' + y'|², t = |x' − y'|². Of one feature

    positive        exp(w·(x' + y') − (|x'|² + |y'|²)/2)    mean SM, variance SM² (e^s − 1)
    trigonometric   exp((|x'|² + |y'|²)/2) cos(w·(x' − y')) mean SM, variance e^s SM⁻² (1 − e^−t)²/2

Choromanski et al. 2020 (arXiv:2009.14794), lemmas 1 and 2, theorem 2. The positive feature over its
mean is a lognormal number, whose sample variance says nothing once s is above about 2: its fourth
moment is e^(6s).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from headwise.attention.feature_maps import PositiveRandomFeatures
from headwise.theorems.measured import Measured, estimate

__all__ = [
    "MOST",
    "kernel",
    "mean_of",
    "pair",
    "positive",
    "squared_errors",
    "trigonometric",
    "variance_of",
]

MOST: Final = 2.0  # |x' + y'|² up to which a sample variance can be trusted


def pair(d: int, size: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Two vectors of R^d with |x' + y'|² = size, x' and y' of lengths and directions at random."""
    x, y = (torch.randn(d, generator=generator, dtype=torch.float64) for _ in range(2))
    total = (x + y).norm() * d**-0.25
    return x * math.sqrt(size) / total, y * math.sqrt(size) / total


def kernel(x: Tensor, y: Tensor) -> float:
    """SM = exp(x·y / √d)."""
    return math.exp(float(x @ y) / math.sqrt(len(x)))


def positive(x: Tensor, y: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Independent estimates of the kernel over the kernel, by one positive feature each."""
    phi = PositiveRandomFeatures.iid(len(x), draws, generator=generator)
    return draws * phi(x) * phi(y) / kernel(x, y)


def trigonometric(x: Tensor, y: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Independent estimates of the kernel over the kernel, by one trigonometric feature each."""
    x, y = x * len(x) ** -0.25, y * len(y) ** -0.25
    w = torch.randn(draws, len(x), generator=generator, dtype=torch.float64)
    size = torch.exp((x.square().sum() + y.square().sum()) / 2 - x @ y)
    return size * torch.cos(w @ (x - y))


def mean_of(ratios: Tensor, name: str) -> Measured:
    """E[estimate] / SM = 1."""
    error = float(ratios.std()) / math.sqrt(len(ratios))
    return estimate(name, float(ratios.mean()), predicted=1.0, error=error, draws=len(ratios))


def variance_of(ratios: Tensor, x: Tensor, y: Tensor, name: str, *, trig: bool = False) -> Measured:
    """The variance over its prediction, with the exact error of a sample variance, from μ₄.

    Moments of a positive feature: E r^k = e^(k (k−1) s/2). Those of a cosine, with E cos(l δ) =
    e^(−l² t/2), come from its powers as sums of cosines.
    """
    x, y = x * len(x) ** -0.25, y * len(y) ** -0.25
    if trig:
        t = float((x - y).square().sum())
        one, two, three, four = (math.exp(-(i**2) * t / 2) for i in (1, 2, 3, 4))
        moments = (one, (1 + two) / 2, (3 * one + three) / 4, (3 + 4 * two + four) / 8)
        factor = math.exp(t / 2)
        m1, m2, m3, m4 = (m * factor**i for i, m in enumerate(moments, 1))
    else:
        s = float((x + y).square().sum())
        m1, m2, m3, m4 = (math.exp(i * (i - 1) * s / 2) for i in (1, 2, 3, 4))
    variance = m2 - m1**2
    fourth = m4 - 4 * m3 * m1 + 6 * m2 * m1**2 - 3 * m1**4
    error = math.sqrt((fourth - variance**2) / len(ratios)) / variance
    found = float(ratios.var()) / variance
    return estimate(name, found, predicted=1.0, error=error, draws=len(ratios))


def squared_errors(
    x: Tensor, y: Tensor, features: int, draws: int, make: Callable[[], PositiveRandomFeatures]
) -> list[float]:
    """(estimate / SM − 1)² of independent maps with so many features."""
    true = kernel(x, y)
    both = torch.stack((x, y))
    found = []
    for _ in range(draws):
        a, b = make()(both)
        found.append((float(a @ b) / true - 1) ** 2)
    return found
