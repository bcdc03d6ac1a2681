"""Tolerances, derived once; no test carries a number of its own.

u is the unit roundoff of the arithmetic (2^-24 for float32, 2^-53 for float64). A logit is a sum of
d products, so rounding moves it by at most γ_d · reach, where

    reach = max_ij scale · Σ_c |q_ic k_jc| + |bias| + |sink|

bounds every partial sum; typically by √d · u · reach. Folding log2 e into q, the cap and the shift
by the maximum add a few u · reach. With room for d ≤ 128,

    ε = 16 u (1 + reach)                       bounds the error of one logit.

Everything else follows from ε:

* softmax: logits that move by at most ε change every weight by a factor within e^{±2ε}, so weights
  have relative error 2ε, and so have sums of weights (masses, columns, blocks, bands). Summing n
  non-negative terms adds n·u in the worst case and log2(n)·u pairwise, inside the room left in ε.
* output: 2ε · max |v|, a convex combination of values with perturbed weights.
* log-sum-exp is 1-Lipschitz in the maximum norm: ε. So are maximum, minimum and mean.
* variance of the logits: d Var = 2 Cov(s, ds) <= 2 · range · ε; computed from Σx and Σx² with
  |x| <= 2 reach it loses u · (2 reach)², also below 2 · (2 reach) · ε.
* entropy H = L − Σ a s: dH = −Σ a (s − μ) ds, and Σ a |s − μ| <= 2 H <= 2 ln n because s <= L and
  L − μ = H; so 2ε ln n, and computing L − Σ a s itself loses a few u · reach: ε (1 + 2 ln n).
* Σ a²: relative error 4ε.  Distance: 2ε times the largest distance (offsets of that size are added
  and taken away again).
* gradients: dS = A ∘ (dA − D) with |dA|, |D| <= G = max‖dO‖ · max‖v‖, so each dS has error
  a · G · 4ε + a · 4ε · G = 8ε a G. Rows of A sum to 1, so dq has scale · max|k| · 8εG, columns sum
  to at most m (the rows), so dk has scale · max|q| · m · 8εG, dv has m · max|dO| · 2ε. Upstream
  gradients of the log-sum-exp count as G too.

References compute in float64 from the same inputs; their own rounding is 2^29 times smaller (or
equal, when the tested arithmetic is float64: the room in 16 covers both).
Half precision results are rounded once at the end: half the spacing, relative, on top.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@dataclass(frozen=True)
class Tolerance:
    """Absolute bounds for one problem, all from ε."""

    epsilon: float
    reach: float
    keys: int

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        scale: float | None = None,
        bias: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Tolerance:
        """From the inputs; half precision inputs are computed in float32."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        group = q.shape[1] // k.shape[1]
        a, b = q.double().abs(), k.double().abs().repeat_interleave(group, 1)
        reach = abs(scale) * finite_max(a @ b.transpose(-1, -2))
        reach += 0.0 if bias is None else finite_max(bias)
        reach += 0.0 if sinks is None else finite_max(sinks)
        unit = UNIT.get(q.dtype, UNIT[torch.float32])
        return cls(16 * unit * (1 + reach), reach, k.shape[2])

    @property
    def logit(self) -> float:
        return self.epsilon

    @property
    def weight(self) -> float:
        """Relative, for any sum of weights."""
        return 2 * self.epsilon

    @property
    def square(self) -> float:
        """Relative, for a sum of squared weights."""
        return 4 * self.epsilon

    @property
    def entropy(self) -> float:
        return self.epsilon * (1 + 2 * math.log(max(self.keys, 2)))

    @property
    def variance(self) -> float:
        return 2 * (2 * self.reach + 1) * self.epsilon

    def output(self, v: Tensor) -> float:
        return 2 * self.epsilon * finite_max(v) + ROUNDING.get(v.dtype, 0.0) * finite_max(v)

    def distance(self, furthest: float) -> float:
        return 2 * self.epsilon * max(furthest, 1.0)

    def gradients(
        self, q: Tensor, k: Tensor, v: Tensor, upstream: float, scale: float | None = None
    ) -> dict[str, float]:
        """Bounds for dq, dk, dv; ``upstream`` bounds the norm of every row of dO (and |dL|)."""
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        rows = q.shape[2] * (q.shape[1] // k.shape[1])
        g = upstream * (1 + float(v.detach().double().norm(dim=-1).max())) * 8 * self.epsilon
        return {
            "q": abs(scale) * finite_max(k) * g,
            "k": abs(scale) * finite_max(q) * g * rows,
            "v": 2 * self.epsilon * upstream * rows,
            "bias": g * rows * q.shape[0],
            "sinks": g * q.shape[0] * q.shape[2],
        }


def finite_max(x: Tensor) -> float:
    """max |x| over the finite entries."""
    x = x.detach().double().abs()
    return float(torch.where(torch.isfinite(x), x, 0.0).max()) if x.numel() else 0.0


def assert_close(got: Tensor, want: Tensor, absolute: float, relative: float = 0.0) -> None:
    """NaN matches NaN and infinities match themselves; the rest within the bounds."""
    got, want = got.detach().double(), want.detach().double()
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert torch.equal(got.isnan(), want.isnan()), "NaN in different places"
    special = ~torch.isfinite(want)
    assert torch.equal(got[special].nan_to_num(nan=0.0), want[special].nan_to_num(nan=0.0))
    error = (got - want)[~special].abs()
    excess = error - absolute - relative * want[~special].abs()
    assert not error.numel() or bool((excess <= 0).all()), (
        f"error {error.max():.3e}, over the bound by {excess.max():.3e}"
        f" (absolute {absolute:.3e}, relative {relative:.3e})"
    )
