"""Why logits are divided by √d_k: their mean and variance, and what changes them."""

from __future__ import annotations

import math
from typing import Final

import torch

from headwise.theorems.logit_draws import (
    FOURTH,
    Draw,
    aligned,
    logits,
    normal,
    shared_factor,
    shifted,
    uniform,
)
from headwise.theorems.logit_moments import ALIGNED, GENERAL, GRAM, SHARED
from headwise.theorems.logit_rows import WITHIN_ROW
from headwise.theorems.measured import (
    Measured,
    bootstrap,
    estimate,
    mean_estimate,
    slope,
    within,
)
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    Plot,
    Textbook,
    Theorem,
)
from headwise.theorems.trained_spread import logit_variance_of

__all__ = ["THEOREMS"]

_SIGMA: Final = 1.3
_WIDTHS: Final = (7, 13, 29, 61, 127, 251, 509)


def _moments(
    draw: Draw, generator: torch.Generator, pairs: int, d: int, name: str, fourth: float
) -> tuple[Measured, Measured]:
    """Mean and variance over independent pairs, as shares of σ²√d and d σ⁴.

    Standard errors: 1/√N of the mean; of the variance √(2/(N−1) + κ/N), where the excess kurtosis
    of a sum of d independent products is κ = (E q⁴ E k⁴/σ⁸ − 3)/d.
    """
    q, k = draw(generator, pairs, d)
    s = logits(_SIGMA * q, _SIGMA * k) / (_SIGMA**2 * math.sqrt(d))
    kappa = (fourth**2 - 3) / d
    return (
        estimate(
            f"mean / (σ²√d), d = {d}, {name}", float(s.mean()), predicted=0.0,
            error=1 / math.sqrt(pairs), draws=pairs,
        ),
        estimate(
            f"variance / (d σ⁴), d = {d}, {name}", float(s.var()), predicted=1.0,
            error=math.sqrt(2 / (pairs - 1) + kappa / pairs), draws=pairs,
        ),
    )  # fmt: skip


def _variance(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    widths, pairs = effort.pick((17, 61, 251), (17, 61, 251, 1021)), effort.pick(8009, 40009)
    kinds: dict[str, Draw] = {"normal": normal, "uniform": uniform}
    found = [
        _moments(draw, generator, pairs, d, name, FOURTH[name])
        for d in widths
        for name, draw in kinds.items()
    ]
    rest = [
        _moments(draw, generator, pairs, 61, "normal", 3.0)
        for draw in (aligned(0.5), shared_factor(0.3), shifted(0.5))
    ]
    names = ("q and k correlated, ρ = 0.5", "coordinates correlated, c = 0.3", "means of σ/2")
    use = ((0, 1), (1,), (0, 1))
    largest = max(abs(each.z or 0.0) for pair in found for each in pair)
    return Evidence(
        measured=tuple(each for pair in found for each in pair),
        controls=tuple(
            Control(name=name, measured=tuple(pair[i] for i in which))
            for name, pair, which in zip(names, rest, use, strict=True)
        ),
        finding=(
            f"Var(q·k)/(d_k σ⁴) is {found[0][1].value:.3f} at d_k = {widths[0]} and"
            f" {found[-1][1].value:.3f} at {widths[-1]}; no mean or variance is more than"
            f" {largest:.1f} standard errors from its prediction."
        ),
    )


def _spreads(
    draw: Draw, generator: torch.Generator, pairs: int, scale: float | None, power: float = 0.0
) -> list[float]:
    """Standard deviation of the logits at every width, times d^power."""
    found = []
    for d in _WIDTHS:
        q, k = draw(generator, pairs, d)
        found.append(float(logits(q, k, scale).std()) * d**power)
    return found


def _plot(raw: list[list[float]], scaled: list[list[float]], common: list[list[float]]) -> Plot:
    def curve(name: str, runs: list[list[float]]) -> Curve:
        table = torch.tensor(runs)
        errors = table.std(0) / math.sqrt(len(runs))
        return Curve(name, tuple(table.mean(0).tolist()), tuple(errors.tolist()))

    return Plot(
        title="Spread of the logits",
        across="d_k",
        up="standard deviation",
        places=tuple(float(d) for d in _WIDTHS),
        curves=(
            Curve("√d_k", tuple(math.sqrt(d) for d in _WIDTHS)),
            curve("q·k", raw),
            curve("q·k/√d_k", scaled),
            curve("control: correlated coordinates", common),
        ),
        log=(True, True),
    )


def _slope(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws, pairs = effort.pick(16, 53), effort.pick(499, 1999)
    x = [float(d) for d in _WIDTHS]
    raw = [_spreads(normal, generator, pairs, 1.0) for _ in range(draws)]
    scaled = [_spreads(normal, generator, pairs, None) for _ in range(draws)]
    over = [_spreads(normal, generator, pairs, 1.0, -1.0) for _ in range(draws)]
    common = [_spreads(shared_factor(0.3), generator, pairs, 1.0) for _ in range(draws)]

    def measured(name: str, runs: list[list[float]], predicted: float) -> Measured:
        return mean_estimate(name, [slope(x, run) for run in runs], predicted=predicted)

    found = (
        measured("slope of log std, q·k", raw, 0.5),
        measured("slope of log std, q·k/√d", scaled, 0.0),
        measured("slope of log std, q·k/d", over, -0.5),
    )
    return Evidence(
        measured=found,
        controls=(
            Control(
                name="divided by d in place of √d",
                measured=(measured("slope of log std, q·k/√d", over, 0.0),),
            ),
            Control(
                name="coordinates correlated, c = 0.3",
                measured=(measured("slope of log std, q·k", common, 0.5),),
            ),
        ),
        finding=(
            f"From d_k = {_WIDTHS[0]} to {_WIDTHS[-1]} the spread of q·k grows like"
            f" d_k^{found[0].value:.3f}, that of q·k/√d_k like d_k^{found[1].value:.3f}."
        ),
        plots=(_plot(raw, scaled, common),),
    )


def _growth(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws, pairs = effort.pick(16, 31), effort.pick(499, 1999)
    widths = (17, 67, 257, effort.pick(509, 1021))

    def slopes(draw: Draw, power: float) -> list[float]:
        found = []
        for _ in range(draws):
            rms = [
                float(logits(*draw(generator, pairs, d)).square().mean().sqrt()) * d**power
                for d in widths
            ]
            found.append(slope([float(d) for d in widths], rms))
        return found

    def measured(name: str, runs: list[float], allowed: tuple[float, float]) -> Measured:
        return within(
            name, sum(runs) / draws, allowed=allowed, draws=draws,
            interval=bootstrap(runs, lambda some: sum(some) / len(some), seed=effort.seed),
        )  # fmt: skip

    together, apart = slopes(aligned(0.3), 0.0), slopes(normal, 0.0)
    grows, flat = (0.85, 1.02), (-0.15, 0.02)
    start = mean_estimate("slope of log rms, independent", apart, predicted=0.5)
    aligned_slope = measured("slope of log rms, ρ = 0.3", together, grows)
    divided = [each - 1 for each in together]
    return Evidence(
        measured=(
            start,
            aligned_slope,
            measured("slope of log rms of q·k/d, ρ = 0.3", divided, flat),
        ),
        controls=(
            Control(
                name="q and k independent",
                measured=(measured("slope of log rms, ρ = 0.3", apart, grows),),
            ),
            Control(
                name="divided by √d",
                measured=(
                    measured(
                        "slope of log rms of q·k/d, ρ = 0.3", slopes(aligned(0.3), -0.5), flat
                    ),
                ),
            ),
        ),
        finding=(
            f"Root mean square of q·k grows like d_k^{start.value:.3f} when q and k are"
            f" independent and like d_k^{aligned_slope.value:.3f} when they are correlated by 0.3."
        ),
    )


_VARIANCE: Final = Theorem(
    name="logit-variance",
    title="Why attention divides by √d_k",
    statement=(
        "If q and k are independent, with uncorrelated coordinates of mean 0 and variance σ², then"
        " q·k has mean 0 and variance d_k σ⁴. No normal distribution is needed."
    ),
    latex=r"\mathbb{E}\,\langle q, k\rangle = 0, \qquad"
    r" \mathrm{Var}\,\langle q, k\rangle = d_k \sigma^4",
    conditions=(
        "q is independent of k",
        "every coordinate has mean 0",
        "every coordinate has variance σ²",
        "coordinates are uncorrelated, within q or within k",
    ),
    source="Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1, footnote 4",
    kind=Kind.EXPECTATION,
    prediction="mean 0; variance d_k σ⁴",
    estimator="mean and variance over independent pairs, normal and uniform coordinates",
    random=_variance,
    model=logit_variance_of,
    textbook=(
        Textbook(
            "the logits have variance d_k at initialisation",
            "over draws of the weights, given the tokens; within one row, which is what the softmax"
            " sees, it is smaller by 1 − ρ_x, ρ_x the mean cosine between tokens",
        ),
    ),
    exercise=1,
    proof="logit-variance",
)

_SLOPE: Final = Theorem(
    name="logit-scaling",
    title="Only 1/√d_k makes the spread of the logits independent of d_k",
    statement=(
        "The standard deviation of q·k is proportional to d_k^(1/2): divided by √d_k it does not"
        " depend on d_k, divided by d_k it falls like d_k^(−1/2)."
    ),
    latex=r"\mathrm{std}\,\langle q,k\rangle \propto d_k^{1/2}, \qquad"
    r" \mathrm{std}\,\frac{\langle q,k\rangle}{\sqrt{d_k}} = \sigma^2",
    conditions=_VARIANCE.conditions,
    source=_VARIANCE.source,
    kind=Kind.EXPECTATION,
    prediction="slopes 1/2, 0 and −1/2 of log std on log d_k",
    estimator="least squares over seven widths, standard error over draws of the whole sweep",
    random=_slope,
    proof="logit-variance",
)

_GROWTH: Final = Theorem(
    name="logit-growth",
    title="If training aligns q and k, logits grow like d_k",
    statement=(
        "When coordinates of q and k are correlated by ρ, the mean square of q·k is"
        " ρ²d_k² + d_k(1 + ρ²): its root grows like d_k, and only division by d_k stops it. Whether"
        " training aligns them is another question: growth of |q| and |k| has the same effect."
    ),
    latex=r"\mathbb{E}\,\langle q,k\rangle^2 = \sigma^4\left(\rho^2 d_k^2 + d_k (1+\rho^2)\right)",
    conditions=("every coordinate of k has the same correlation ρ with that of q", "ρ² d_k > 1"),
    source="Yang et al. 2022 (arXiv:2203.03466), definition 4.1; Wortsman et al. 2023"
    " (arXiv:2309.14322), section 3.1",
    kind=Kind.REGULARITY,
    prediction="slope 1/2 when independent; towards 1 when ρ = 0.3; 0 after division by d_k",
    estimator="slope of log root mean square on log d_k; bootstrap over draws of the sweep",
    random=_growth,
    textbook=(
        Textbook(
            "muP divides by d_k because trained queries and keys are aligned",
            "aligned ones need it; in measured runs logits also grow because |q| and |k| do",
        ),
    ),
    proof="correlated-queries-and-keys",
)

THEOREMS: Final = (_VARIANCE, _SLOPE, GENERAL, GRAM, WITHIN_ROW, ALIGNED, SHARED, _GROWTH)
