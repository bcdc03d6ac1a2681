"""Linear attention: random features of the softmax kernel, what they cost, and its causal forms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from headwise.attention import linear
from headwise.attention.definition import attention
from headwise.attention.feature_maps import FeatureMap, PositiveRandomFeatures, elu_plus_one
from headwise.attention.linear_definition import kernel_attention
from headwise.attention.masks import Causal
from headwise.theorems.measured import Measured, bootstrap, exact, slope, within
from headwise.theorems.random_features import (
    MOST,
    mean_of,
    pair,
    positive,
    squared_errors,
    trigonometric,
    variance_of,
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

__all__ = ["THEOREMS", "orthogonal_ratio"]


def _features(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(100_003, 1_000_003)
    measured: list[Measured] = []
    for d, size in ((7, 0.5), (13, 1.0), (29, MOST)):
        x, y = pair(d, size, generator)
        name = f"|x' + y'|² = {size:g}"
        ratios = positive(x, y, draws, generator)
        waves = trigonometric(x, y, draws, generator)
        measured += [
            mean_of(ratios, f"mean / SM, positive, {name}"),
            variance_of(ratios, x, y, f"variance / prediction, positive, {name}"),
            mean_of(waves, f"mean / SM, trigonometric, {name}"),
            variance_of(waves, x, y, f"variance / prediction, trigonometric, {name}", trig=True),
        ]
    x, y = pair(13, 1.0, generator)
    ratios = positive(x, y, draws, generator)
    normaliser = math.exp(float(x.square().sum() + y.square().sum()) / (2 * math.sqrt(13)))
    far_x, far_y = pair(13, 11.0, generator)
    far = variance_of(positive(far_x, far_y, draws, generator), far_x, far_y, "the same")
    wide = variance_of(positive(x * 1.2, y * 1.2, draws, generator), x, y, "variance")
    return Evidence(
        measured=tuple(measured),
        controls=(
            Control(
                name="features without exp(−|x'|²/2)",
                measured=(mean_of(ratios * normaliser, "mean / SM"),),
            ),
            Control(name="vectors 20 % longer than in the formula", measured=(wide,)),
        ),
        finding=(
            f"Means over SM: {measured[0].value:.4f}, {measured[4].value:.4f},"
            f" {measured[8].value:.4f}; variances over the formula: {measured[1].value:.3f},"
            f" {measured[5].value:.3f}, {measured[9].value:.3f} (positive),"
            f" {measured[3].value:.3f}, {measured[7].value:.3f}, {measured[11].value:.3f}"
            f" (trigonometric). At |x' + y'|² = 11, {draws:,} features show {far.value:.2g} of the"
            " variance: the rest is in a tail that no sample meets."
        ),
    )


def orthogonal_ratio(
    effort: Effort, d: int, features: int, *, draws: int = 10_007, repeated: bool = False
) -> tuple[float, tuple[float, float], int]:
    """Mean squared error of orthogonal over independent features, its 99 % interval, the draws.

    ``repeated``: in place of orthogonal directions, one direction for all features. |x' + y'|² is
    1/2, where tails are short and the two differ by some tenth.
    """
    generator = torch.Generator().manual_seed(effort.seed + 7)
    draws = effort.pick(draws, 8 * draws)
    x, y = pair(d, 0.5, generator)

    def iid() -> PositiveRandomFeatures:
        return PositiveRandomFeatures.iid(d, features, generator=generator)

    def other() -> PositiveRandomFeatures:
        if not repeated:
            return PositiveRandomFeatures.orthogonal(d, features, generator=generator)
        one = torch.randn(1, d, generator=generator, dtype=torch.float64)
        return PositiveRandomFeatures(one.expand(features, d))

    a = squared_errors(x, y, features, draws, other)
    b = squared_errors(x, y, features, draws, iid)
    parts = [
        (statistics.fmean(a[i::53]), statistics.fmean(b[i::53])) for i in range(53)
    ]  # blocks of independent draws: resampling every draw would cost more than drawing it
    interval = bootstrap(parts, lambda p: sum(i for i, _ in p) / sum(j for _, j in p))
    return statistics.fmean(a) / statistics.fmean(b), interval, draws


def _orthogonal(effort: Effort) -> Evidence:
    d = 11
    measured = []
    for features in (d, 4 * d):
        ratio, interval, draws = orthogonal_ratio(effort, d, features)
        name = f"squared error, orthogonal / independent, {features} features"
        measured.append(within(name, ratio, allowed=(0.0, 1.0), interval=interval, draws=draws))
    ratio, interval, draws = orthogonal_ratio(effort, d, d, draws=1009, repeated=True)
    wrong = within("squared error / independent", ratio, allowed=(0.0, 1.0), interval=interval,
                   draws=draws)  # fmt: skip
    found = ", ".join(f"{each.value:.2f}" for each in measured)
    return Evidence(
        measured=tuple(measured),
        controls=(Control(name="one direction for all features", measured=(wrong,)),),
        finding=(
            f"With d = {d}, orthogonal features have {found} of the squared error of independent"
            f" ones at d and 4d features; all along one direction, {wrong.value:.1f} times."
        ),
    )


def _error(o: Tensor, true: Tensor) -> float:
    return float((o - true).norm() / true.norm())


def _uniform(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v.mean(2, keepdim=True).expand(*q.shape[:3], v.shape[-1])


def _errors(
    sigma: float, numbers: tuple[int, ...], effort: Effort, *, orthogonal: bool = False
) -> tuple[list[list[float]], list[float], list[float]]:
    """Errors of outputs, relative to softmax attention, one list for each draw: by number of
    features; and those of the uniform average and of elu + 1."""
    generator = torch.Generator().manual_seed(effort.seed + 13)
    n, d, draws = 256, 32, effort.pick(59, 127)
    make = PositiveRandomFeatures.orthogonal if orthogonal else PositiveRandomFeatures.iid
    by_number, uniform, elu = [], [], []
    for _ in range(draws):
        q, k, v = (
            torch.randn(1, 1, n, d, generator=generator, dtype=torch.float64) for _ in range(3)
        )
        q, k = sigma * q, sigma * k
        true = attention(q, k, v)
        maps: list[FeatureMap] = [make(d, m, generator=generator) for m in numbers]
        by_number.append([_error(linear.linear_attention(q, k, v, phi), true) for phi in maps])
        uniform.append(_error(_uniform(q, k, v), true))
        elu.append(_error(linear.linear_attention(q, k, v, elu_plus_one), true))
    return by_number, uniform, elu


def _mean(draws: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*draws, strict=True)]


def _approximation(effort: Effort) -> Evidence:
    numbers = effort.pick((32, 128, 512), (8, 32, 128, 512, 2048))
    small, uniform, elu = _errors(0.5, numbers, effort)
    large, uniform_1, elu_1 = _errors(1.0, numbers, effort)
    tail = slice(numbers.index(128), None)

    def rate(draws: list[list[float]]) -> float:
        return slope(numbers[tail], _mean(draws)[tail])

    def over(draws: list[tuple[float, float]]) -> float:
        return statistics.fmean(a for a, _ in draws) / statistics.fmean(b for _, b in draws)

    def ratio(errors: list[list[float]], base: list[float], name: str) -> Measured:
        pairs = [(e[numbers.index(512)], u) for e, u in zip(errors, base, strict=True)]
        return within(
            name, over(pairs), allowed=(0.0, 1.0), interval=bootstrap(pairs, over), draws=len(pairs)
        )

    falls = within("slope of log error on log m, from 128", rate(small), allowed=(-0.6, -0.3),
                   interval=bootstrap(small, rate), draws=len(small))  # fmt: skip
    beats = ratio(small, uniform, "error at 512 features / uniform average, σ = 1/2")
    loses = ratio(large, uniform_1, "error at 512 features / uniform average")
    at = _mean(small)
    half, one = statistics.fmean(uniform), statistics.fmean(uniform_1)
    return Evidence(
        measured=(falls, beats),
        controls=(Control(name="queries and keys of σ = 1", measured=(loses,)),),
        finding=(
            f"n = 256, d = 32, σ = 1/2: error {at[numbers.index(32)]:.2f} at 32 features,"
            f" {at[numbers.index(512)]:.2f} at 512, against {half:.2f} of the uniform average and"
            f" {statistics.fmean(elu):.3f} of elu + 1; σ = 1: {_mean(large)[-1]:.2f} at"
            f" {numbers[-1]}, against {one:.2f} and {statistics.fmean(elu_1):.2f}."
        ),
        plots=(
            Plot(
                title="Error of linear attention against the number of features",
                across="features m",
                up="‖o − softmax attention‖ / ‖softmax attention‖",
                places=tuple(float(m) for m in numbers),
                curves=(
                    Curve("σ = 1/2", tuple(at)),
                    Curve("σ = 1/2, uniform average", (half,) * len(numbers)),
                    Curve("m^(−1/2), through the last",
                          tuple(at[-1] * math.sqrt(numbers[-1] / m) for m in numbers)),
                    Curve("control: σ = 1", tuple(_mean(large))),
                    Curve("control: uniform average", (one,) * len(numbers)),
                ),
                log=(True, True),
            ),
        ),
    )  # fmt: skip


Form = Callable[[Tensor, Tensor, Tensor, FeatureMap], Tensor]


def _forms(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, d, d_value = effort.pick((61, 13, 7), (509, 31, 17))
    q = torch.randn(2, 6, n, d, generator=generator, dtype=torch.float64)
    k = torch.randn(2, 3, n, d, generator=generator, dtype=torch.float64)
    v = torch.randn(2, 3, n, d_value, generator=generator, dtype=torch.float64)
    true = kernel_attention(q, k, v, elu_plus_one, mask=Causal())
    # Sums of n m positive terms in another order, above and below the fraction bar.
    tolerance = 4 * n * d * torch.finfo(torch.float64).eps / 2 * float(v.abs().max())
    forms: dict[str, Form] = {
        "parallel": linear.linear_attention_parallel,
        "recurrent": lambda *x: linear.linear_attention_recurrent(*x)[0],
        "in chunks of 11": lambda *x: linear.linear_attention_chunked(*x, chunk=11)[0],
    }

    def apart(name: str, form: Form) -> Measured:
        found = float((form(q, k, v, elu_plus_one) - true).abs().max())
        return exact(f"{name}: largest difference", found, tolerance=tolerance)

    measured = tuple(apart(name, form) for name, form in forms.items())
    state = linear.linear_attention_recurrent(q, k, v, elu_plus_one)[1]
    half = n // 2
    short = linear.linear_attention_recurrent(
        q[:, :, :half], k[:, :, :half], v[:, :, :half], elu_plus_one
    )[1]
    size = exact(
        "numbers in the state after n tokens, less those after n / 2",
        state.weighted.numel() - short.weighted.numel() + state.total.numel() - short.total.numel(),
        tolerance=0.0,
    )
    everything = apart("every key seen", linear.linear_attention)
    return Evidence(
        measured=(*measured, size),
        controls=(Control(name="without the causal mask", measured=(everything,)),),
        finding=(
            f"The three causal forms agree with the definition within"
            f" {max(each.value for each in measured):.1e}, and the state holds"
            f" {state.weighted.numel() + state.total.numel():,} numbers, however long the text."
        ),
    )


THEOREMS: Final = (
    Theorem(
        name="random-features",
        title="Random features of the softmax kernel are unbiased",
        statement=(
            "Positive and trigonometric random features estimate exp(x·y/√d) without bias. Of m"
            " independent ones the variances are SM² (e^s − 1)/m and e^s SM⁻² (1 − e^−t)²/(2m),"
            " with s = |x' + y'|², t = |x' − y'|² and x' = x d^(−1/4)."
        ),
        latex=(
            r"\mathbb{E}\,\phi(x)\cdot\phi(y) = e^{x'\cdot y'} = \mathrm{SM}, \qquad"
            r" \mathrm{Var}_{+} = \tfrac{1}{m}\,\mathrm{SM}^2\,(e^{|x'+y'|^2} - 1), \qquad"
            r" \mathrm{Var}_{\mathrm{trig}} = \tfrac{1}{2m}\, e^{|x'+y'|^2}\,\mathrm{SM}^{-2}"
            r" (1 - e^{-|x'-y'|^2})^2"
        ),
        conditions=(
            "the directions w are standard normal",
            "for a sample variance that can be trusted: |x' + y'|² at most 2",
        ),
        source="Choromanski et al. 2020 (arXiv:2009.14794), lemmas 1 and 2",
        kind=Kind.EXPECTATION,
        prediction="mean / SM = 1 and variance / formula = 1",
        estimator=(
            "over independent features, each a draw; the error of the variance is exact, from the"
            " fourth moment"
        ),
        random=_features,
        textbook=(
            Textbook(
                "the variance of positive features can be read from a sample",
                "only for short vectors: they are lognormal, and above |x' + y'|² of about 2 the"
                " variance sits in a tail that is not drawn",
            ),
        ),
        proof="random-features",
    ),
    Theorem(
        name="orthogonal-features",
        title="Orthogonal features are at least as good as independent ones",
        statement=(
            "With directions that are orthogonal within blocks of d, the mean squared error of"
            " positive features is at most that of as many independent ones."
        ),
        latex=r"\mathbb{E}\,(\hat\kappa_{\mathrm{ort}} - \mathrm{SM})^2 \le"
        r" \mathbb{E}\,(\hat\kappa_{\mathrm{iid}} - \mathrm{SM})^2",
        conditions=("each direction alone is standard normal", "orthogonal within each block of d"),
        source="Choromanski et al. 2020 (arXiv:2009.14794), theorem 2",
        kind=Kind.REGULARITY,
        prediction="a ratio of the two between 0 and 1, at d and 4d features",
        estimator="mean squared errors over independent maps, with a bootstrap interval",
        random=_orthogonal,
    ),
    Theorem(
        name="features-needed",
        title="Linear attention approximates softmax attention only where logits are small",
        statement=(
            "The error of linear attention with m positive features falls about as m^(−1/2) and"
            " gets below that of the uniform average, as long as logits are small (σ = 1/2). With"
            " logits as at initialisation (σ = 1) no affordable m does."
        ),
        latex=r"\frac{\|\hat O_m - O\|_F}{\|O\|_F} \sim m^{-1/2}",
        conditions=("entries of q and k have a standard deviation of 1/2",),
        source="Choromanski et al. 2020 (arXiv:2009.14794), section 4; measured here",
        kind=Kind.REGULARITY,
        prediction=(
            "a slope between −0.6 and −0.3 from m = 128 on, and an error below that of the uniform"
            " average at m = 512"
        ),
        estimator="over independent draws of q, k, v and directions; n = 256, d = 32",
        random=_approximation,
        textbook=(
            Textbook(
                "linear attention costs O(n d²)",
                "O(n m d_v) with m features; m = d is elu + 1, which is another kernel and no"
                " approximation of the softmax",
            ),
        ),
    ),
    Theorem(
        name="recurrent-is-parallel",
        title="Causal linear attention is a recurrence",
        statement=(
            "Causal linear attention computed at once, token by token or in chunks is the same"
            " function, and its state does not grow with the number of tokens."
        ),
        latex=(
            r"W_i = W_{i-1} + \phi(k_i)^\top v_i, \quad z_i = z_{i-1} + \phi(k_i), \quad"
            r" o_i = \frac{\phi(q_i) W_i}{\phi(q_i)\cdot z_i}"
        ),
        conditions=("the kernel is a product φ(q)·φ(k)", "causal mask"),
        source="Katharopoulos et al. 2020 (arXiv:2006.16236), sections 3.3 and 3.4",
        kind=Kind.IDENTITY,
        prediction="equal up to rounding; a state of m (d_v + 1) numbers",
        estimator="the largest difference from the definition with its n × n matrix, in float64",
        random=_forms,
        proof="recurrent-is-parallel",
    ),
)
