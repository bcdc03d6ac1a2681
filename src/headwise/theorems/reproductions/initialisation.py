"""Results about weights at initialisation: Vaswani's variance of logits, Xiong's top gradient."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from headwise.theorems.measured import Measured, bootstrap, estimate, slope, within
from headwise.theorems.norm_placement import THEOREMS as NORMS
from headwise.theorems.registry import named
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    Plot,
    Theorem,
)

__all__ = ["THEOREMS"]

_WIDTHS: Final = (7, 17, 31, 67, 127, 257, 509)
_SLOPE: Final = (0.48, 0.52)
_SHARED: Final = 0.3  # correlation of the entries of a vector, in the control


def _products(effort: Effort, common: float) -> list[Tensor]:
    """q·k of independent pairs for every width; entries of variance 1.

    ``common`` is the correlation of the entries within q and within k.
    """
    generator = torch.Generator().manual_seed(effort.seed)
    count = effort.pick(10_007, 100_003)
    found = []
    for width in _WIDTHS:
        q, k = torch.randn(2, count, width, generator=generator, dtype=torch.float64)
        if common:
            shared = torch.randn(2, count, 1, generator=generator, dtype=torch.float64)
            q, k = (
                math.sqrt(1 - common) * x + math.sqrt(common) * s
                for x, s in zip((q, k), shared, strict=True)
            )
        found.append((q * k).sum(-1))
    return found


def _variances(products: list[Tensor]) -> list[Measured]:
    """Var(q·k)/d with its standard error √((2 + 6/d)/N): 6/d is the excess kurtosis of q·k."""
    measured = []
    for width, s in zip(_WIDTHS, products, strict=True):
        n = len(s)
        measured.append(
            estimate(
                f"Var(q·k) / d at d = {width}",
                float(s.var()) / width,
                predicted=1.0,
                error=math.sqrt(2 / (n - 1) + 6 / width / n),
                draws=n,
            )
        )
    return measured


def _growth(products: list[Tensor], seed: int) -> Measured:
    """Slope of log std on log d; draws are cut into 16 parts, which are resampled."""
    parts = [
        [float(s.var()) for s in some]
        for some in zip(*(s.chunk(16) for s in products), strict=True)
    ]

    def of(some: list[list[float]]) -> float:
        return slope(_WIDTHS, [math.fsum(column) for column in zip(*some, strict=True)]) / 2

    return within(
        "slope of log std(q·k) on log d",
        of(parts),
        allowed=_SLOPE,
        interval=bootstrap(parts, of, seed=seed, repeats=500),
        draws=len(parts),
    )


def _variance(effort: Effort) -> Evidence:
    independent, shared = (_products(effort, common) for common in (0.0, _SHARED))
    variances, growth = _variances(independent), _growth(independent, effort.seed)
    wrong = _variances(shared)
    return Evidence(
        measured=(*variances, growth),
        controls=(
            Control(
                name=f"entries of a vector with correlation {_SHARED}",
                measured=(*wrong, _growth(shared, effort.seed)),
            ),
        ),
        finding=(
            f"Var(q·k)/d is {min(v.value for v in variances):.3f} to"
            f" {max(v.value for v in variances):.3f} for d = {_WIDTHS[0]} to {_WIDTHS[-1]}, and the"
            f" standard deviation grows as d^{growth.value:.3f}."
        ),
        plots=(
            Plot(
                title="Variance of q·k",
                across="d",
                up="Var(q·k)",
                places=tuple(float(width) for width in _WIDTHS),
                curves=(
                    Curve("d", tuple(float(width) for width in _WIDTHS)),
                    Curve(
                        "independent entries",
                        tuple(v.value * d for v, d in zip(variances, _WIDTHS, strict=True)),
                        tuple(
                            (v.error or 0.0) * d for v, d in zip(variances, _WIDTHS, strict=True)
                        ),
                    ),
                    Curve(
                        "correlated entries (control)",
                        tuple(v.value * d for v, d in zip(wrong, _WIDTHS, strict=True)),
                    ),
                ),
                log=(True, True),
            ),
        ),
    )


def _again(name: str, of: str, reproduces: str) -> Theorem:
    """A statement of the theory that is itself the result of a paper; random weights only."""
    return replace(named(of, NORMS), name=name, reproduces=reproduces, model=None)


THEOREMS: Final = (
    Theorem(
        name="vaswani-variance",
        title="The variance of q·k is d_k",
        statement=(
            "If the entries of q and k are independent with mean 0 and variance 1, their inner"
            " product has mean 0 and variance d_k: the reason to divide by √d_k."
        ),
        latex=r"\operatorname{Var}(q\cdot k) = d_k",
        conditions=(
            "entries have mean 0 and variance 1",
            "q is independent of k",
            "the entries of q, or those of k, are uncorrelated",
        ),
        source="Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1, footnote 4",
        kind=Kind.EXPECTATION,
        prediction="Var(q·k)/d = 1 for every d; slope 0.5 ± 0.02 of log std on log d",
        estimator="independent Gaussian pairs for 7 widths from 7 to 509",
        random=_variance,
        proof="logit-variance",
        reproduces="B1: Vaswani et al. 2017, section 3.2.1",
    ),
    _again(
        "xiong-gradient-by-depth",
        "norm-placement-gradient",
        "B2: Xiong et al. 2020, theorem 1 and figure 3",
    ),
    _again("xiong-stream-growth", "norm-placement-stream", "B3: Xiong et al. 2020, lemma 2"),
)
