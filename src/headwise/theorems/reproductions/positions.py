"""Results about rotary positions: Su's curve, Barbero's Gaussians and bands, interpolation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from headwise.circuits.layer_weights import RotaryUse
from headwise.circuits.rotary import band_shares_of_data
from headwise.positions import Linear, frequencies
from headwise.theorems.measured import bootstrap, exact, within
from headwise.theorems.registry import named
from headwise.theorems.rotary import THEOREMS as ROTARY
from headwise.theorems.rotary_decay import curve, partial_sums
from headwise.theorems.statement import (
    Control,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_BASE: Final = 10_000.0
_REACH: Final = 4096
_FASTER: Final = 588.0  # 2 · 32 ln 10⁴ is 589.5


def _bands(model: Trained) -> Evidence:
    """Share of |q^(m)| |k^(m)| in quarters of the pairs, from fast to slow, for every head."""
    turning = {layer.module: layer for layer in model.weights.layers if layer.rotary is not None}
    generator = torch.Generator().manual_seed(model.seed)
    rows: list[Tensor] = []
    drawn: list[Tensor] = []  # of Gaussian queries and keys, which use all pairs alike
    for heads in model.heads:
        layer = turning.get(heads.module)
        if layer is None or layer.rotary is None or heads.q.shape[1] < 2:
            continue
        q, k, causal = heads.q[None], heads.k[None], heads.role == "decoder"
        rows += _shares(q, k, layer.rotary, causal)
        a, b = (
            torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device)
            for x in (q[:, :1], k[:, :1])
        )
        drawn += _shares(a, b, layer.rotary, causal)
    if not rows:
        raise NotApplicable("no layer of it has rotary positions")
    quarters = torch.stack(rows)
    means = quarters.mean(0).tolist()
    slow = quarters[:, 2:].sum(1).tolist()
    alike = torch.stack(drawn)[:, 2:].sum(1).tolist()
    name = "mean share of the slower half of the pairs"
    allowed = (0.6, 1.0)
    interval = bootstrap(slow, lambda some: math.fsum(some) / len(some), repeats=500)
    at_top = float((quarters[:, 0] > 0.5).double().mean())
    at_end = float((quarters[:, 3] > 0.5).double().mean())
    return Evidence(
        measured=(
            within(name, math.fsum(slow) / len(slow), allowed=allowed, interval=interval,
                   draws=len(slow)),
        ),
        controls=(
            Control(
                name="Gaussian queries and keys",
                measured=(within(name, math.fsum(alike) / len(alike), allowed=allowed),),
            ),
        ),
        finding=(
            f"Quarters of the pairs, fast to slow, carry {', '.join(f'{m:.2f}' for m in means)} of"
            f" |q||k|; {at_top:.0%} of {len(rows)} heads have more than half in the fastest"
            f" quarter, {at_end:.0%} in the slowest."
        ),
    )  # fmt: skip


def _shares(q: Tensor, k: Tensor, rotary: RotaryUse, causal: bool) -> list[Tensor]:
    """The quarters of every head."""
    shares = band_shares_of_data(q, k, rotary, causal=causal).cpu()
    return [_quarters(row, rotary.inv_freq.cpu()) for row in shares]


def _quarters(shares: Tensor, inv_freq: Tensor) -> Tensor:
    """Shares of four groups of pairs, from fast to slow; what does not turn is the slowest."""
    order = torch.argsort(inv_freq, descending=True)
    line = shares[:-1][order]
    found = torch.stack([part.sum() for part in line.tensor_split(4)])
    found[-1] += shares[-1]
    return found


def _interpolated(h: Tensor, at: Tensor, width: int) -> Tensor:
    """|a(s) − line between the whole positions around s| / max|h|, ``draw s``.

    a(s) = Re Σ_j h_j e^{isθ_j} for h ``draw pair``.
    """
    theta = frequencies(width, base=_BASE).inv_freq

    def a(s: Tensor) -> Tensor:
        angle = s[:, None] * theta
        found: Tensor = (h @ torch.polar(torch.ones_like(angle), angle).mT).real
        return found

    below = at.floor()
    share = at - below
    line = (1 - share) * a(below) + share * a(below + 1)
    return (a(at) - line).abs() / h.abs().amax(1, keepdim=True)


def _interpolation(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    width, draws, places = effort.pick((128, 211, 97), (128, 2003, 401))
    shape = draws, width // 2
    h = torch.complex(*torch.randn(2, *shape, generator=generator, dtype=torch.float64))
    at = _REACH * torch.rand(places, generator=generator, dtype=torch.float64)
    published = width / (32 * math.log(_BASE))
    correct = 1 / (8 * (1 - _BASE ** (-4 / width)))
    found = float(_interpolated(h, at, width).max())
    # The worst case: all pairs in phase between two positions.
    middle = torch.tensor([1000.5], dtype=torch.float64)
    theta = frequencies(width, base=_BASE).inv_freq
    worst = torch.polar(torch.ones_like(theta), -middle * theta)[None]
    adverse = float(_interpolated(worst, middle, width))
    bound = "error of interpolation / bound, {}"
    # |a(s)| ≤ max|h_(j+1) − h_j| Σ|S_j| ≤ 2 max|h| Σ|S_j| at positions up to a trained length.
    ratio = 2 * partial_sums(torch.arange(1, _REACH), width).sum(1) / published
    least = float(ratio.min())
    stretched = frequencies(width, base=_BASE, scaling=Linear(factor=8.0)).inv_freq
    return Evidence(
        measured=(
            within(bound.format("random h, the published bound"), found / published,
                   allowed=(0.0, 1.0), draws=draws),
            within(bound.format("h in phase, with the sum of the series"), adverse / correct,
                   allowed=(0.0, 1.0)),
            exact("positions divided by 8 / frequencies divided by 8",
                  float((stretched * 8 / theta - 1).abs().max()), tolerance=1e-15),
            within("least ratio of extrapolation's bound to interpolation's", least,
                   allowed=(_FASTER, math.inf)),
        ),
        controls=(
            Control(
                name="h in phase, against the published bound",
                measured=(within(bound.format("h in phase"), adverse / published,
                                 allowed=(0.0, 1.0)),),
            ),
        ),
        finding=(
            f"For random h interpolation errs by {found / published:.2f} of the published bound at"
            f" most, and extrapolation's bound is at least {least:,.0f} times larger; with all"
            f" pairs in phase the error is {adverse / published:.3f} of the published bound, since"
            " 1/(1 − b^(−4/d)) exceeds d/(4 ln b)."
        ),
    )  # fmt: skip


_CHEN: Final = "Chen et al. 2023 (arXiv:2306.15595), theorem 2.1 and section 2.3"
_DECAY: Final = named("rotary-decay-bound", ROTARY)
_GAUSSIAN: Final = named("rotary-no-decay", ROTARY)

THEOREMS: Final = (
    replace(
        _DECAY,
        name="su-decay-curve",
        title="The curve of Su's bound",
        prediction="32.5, 31.5, 20.9, 17.9, 12.6, 10.2, 7.2, 6.2, 4.5 at Δ = 0 … 1000, within 1 %",
        estimator="the mean over j of |S_j(Δ)| for 64 pairs and base 10,000",
        conditions=("64 pairs and base 10,000",),
        random=curve,
        reproduces="B11: Su et al. 2021, figure 2",
    ),
    replace(
        _GAUSSIAN,
        name="barbero-no-decay",
        reproduces="B12: Barbero et al. 2024, figure 2",
    ),
    Theorem(
        name="barbero-frequency-use",
        title="Trained models mostly use their slow pairs",
        statement=(
            "In a trained model most of the size of queries and keys lies in pairs of low"
            " frequency; few heads use the fast ones, and those attend by position."
        ),
        latex=(r"u_m \propto \sum_{i \ge j} \|q_i^{(m)}\|\,\|k_j^{(m)}\|, \qquad \sum_m u_m = 1"),
        conditions=("the model is trained", "it has rotary positions"),
        source="Barbero et al. 2024 (arXiv:2410.06205), section 4 and figure 3",
        kind=Kind.REGULARITY,
        prediction="the slower half of the pairs carries more than 60 %",
        estimator="the mean over heads, with a bootstrap interval over heads",
        model=_bands,
        reproduces="B12: Barbero et al. 2024, figure 3",
    ),
    Theorem(
        name="position-interpolation-bound",
        title="Interpolated positions stay close to those of training",
        statement=(
            "Between two whole positions a rotary logit differs from the line between them by at"
            " most d max|h| / (32 ln b) for random vectors, hundreds of times below the bound"
            " of extrapolation. In the worst case it is max|h| / (8(1 − b^(−4/d))), which is more."
        ),
        latex=(
            r"|a(s) - a_{\mathrm{lin}}(s)| \le \max_j |h_j|\,"
            r"\frac{(s-s_1)(s_2-s)}{2\,(1 - b^{-4/d})}, \qquad a(s) = \mathrm{Re}\sum_j h_j"
            r" e^{i s \theta_j}"
        ),
        conditions=("positions of the grid are one apart", "frequencies are b^(−2j/d)"),
        source=_CHEN,
        kind=Kind.IDENTITY,
        prediction="errors below the bounds; extrapolation's bound about 600 times larger",
        estimator="random h, and h with all pairs in phase, at positions up to 4,096",
        random=_interpolation,
        textbook=(
            Textbook(
                "the error is at most d max|h| (s − s₁)(s₂ − s) / (8 ln b)",
                "Σ θ_j² = 1/(1 − b^(−4/d)) (up to its last terms) is larger than d/(4 ln b): with"
                " all pairs in phase the error exceeds this by 14 % at d = 128",
            ),
        ),
        proof="position-interpolation",
        reproduces="B24: Chen et al. 2023, theorem 2.1",
    ),
)
