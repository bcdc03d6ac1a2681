"""Checks of the placement of norms on fresh weights: gradients by depth, growth of the stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Final

from headwise.theorems.deep_stacks import Drawn, Setting, Writes, draw, stack
from headwise.theorems.measured import Measured, bootstrap, slope, within
from headwise.theorems.statement import Control, Curve, Effort, Evidence, Plot

__all__ = ["DEPTHS", "by_depth", "draws_of", "profile", "stream_growth"]

DEPTHS: Final = (6, 12, 24, 48)
_FLAT: Final = (-0.15, 0.15)
_FALLS: Final = (-0.65, -0.35)
_Growth = Callable[[Sequence[Sequence[float]]], list[float]]
_Extreme = Callable[[list[float]], float]
_PRE, _POST = "pre", "post"


@lru_cache(maxsize=8)
def draws_of(
    effort: Effort, placement: str, writes: Writes = "xavier"
) -> tuple[tuple[Drawn, ...], ...]:
    """For every draw of weights, what was found at each depth; kept for the other statements.

    The gradients of all layers are taken where a statement asks for them: with pre-norm.
    """
    every = placement == _PRE
    found = []
    for layers in DEPTHS:
        setting = Setting(placement, layers, writes=writes)
        model = stack(setting)
        count = effort.pick(11, 23)
        seeds = range(1009 * effort.seed, 1009 * effort.seed + count)
        found.append([draw(model, setting, seed, every=every) for seed in seeds])
    return tuple(zip(*found, strict=True))


def _slope(name: str, lines: Sequence[Sequence[float]], allowed: tuple[float, float]) -> Measured:
    """Slope of the mean over draws on depth, both as logarithms; draws are resampled whole."""

    def of(some: Sequence[Sequence[float]]) -> float:
        return slope(DEPTHS, [math.fsum(column) for column in zip(*some, strict=True)])

    interval = bootstrap(list(lines), of, repeats=500)
    return within(name, of(lines), allowed=allowed, interval=interval, draws=len(lines))


def _last(drawn: tuple[tuple[Drawn, ...], ...]) -> list[list[float]]:
    return [[each.last for each in line] for line in drawn]


def means_of(lines: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Means over draws, one for each column."""
    return tuple(math.fsum(column) / len(lines) for column in zip(*lines, strict=True))


def by_depth(effort: Effort) -> Evidence:
    """Slopes of the last layer's gradient on depth, for both placements."""
    pre, post = (_last(draws_of(effort, placement)) for placement in (_PRE, _POST))
    scaled = _last(draws_of(effort, _PRE, "scaled"))
    names = {_PRE: "pre-norm: slope of the top gradient on depth",
             _POST: "post-norm: slope of the top gradient on depth"}  # fmt: skip
    measured = (_slope(names[_POST], post, _FLAT), _slope(names[_PRE], pre, _FALLS))
    means = {_PRE: means_of(pre), _POST: means_of(post)}
    predicted = tuple(means[_PRE][0] * (layers / DEPTHS[0]) ** -0.5 for layers in DEPTHS)
    return Evidence(
        measured=measured,
        controls=(
            Control(
                name="each in place of the other",
                measured=(_slope(names[_PRE], post, _FALLS), _slope(names[_POST], pre, _FLAT)),
            ),
            Control(
                name="pre-norm with writes scaled by 1/√(2L), as in GPT-2",
                measured=(_slope(names[_PRE], scaled, _FALLS),),
            ),
        ),
        finding=(
            f"Over {len(pre)} draws with {DEPTHS[0]} to {DEPTHS[-1]} layers the gradient of the"
            f" last layer goes as L^{measured[0].value:.2f} with post-norm and"
            f" L^{measured[1].value:.2f} with pre-norm."
        ),
        plots=(
            Plot(
                title="Gradient of the last feed-forward matrix at initialisation",
                across="layers L",
                up="Frobenius norm",
                places=tuple(float(layers) for layers in DEPTHS),
                curves=(
                    Curve("pre-norm, L^(−1/2)", predicted),
                    Curve("pre-norm", means[_PRE]),
                    Curve("post-norm", means[_POST]),
                    Curve("pre-norm, writes scaled (control)", means_of(scaled)),
                ),
                log=(True, True),
            ),
        ),
    )


def _of(growth: _Growth, extreme: _Extreme, some: Sequence[Sequence[float]]) -> float:
    return extreme(growth(some))


def _growth(drawn: tuple[tuple[Drawn, ...], ...]) -> tuple[Measured, Measured]:
    """The least and the largest (E|x_l|²/d − 1) / l over all layers of all depths."""
    lines = [[size for each in line for size in each.sizes] for line in drawn]
    layers = [number + 1 for depth in DEPTHS for number in range(depth)]

    def growth(some: Sequence[Sequence[float]]) -> list[float]:
        means = means_of(some)
        return [(mean - 1) / layer for mean, layer in zip(means, layers, strict=True)]

    found = []
    for word, extreme in (("least", min), ("largest", max)):
        interval = bootstrap(lines, partial(_of, growth, extreme), repeats=500)
        found.append(
            within(f"{word} growth of |x|²/d for each layer", extreme(growth(lines)),
                   allowed=(0.5, 1.5), interval=interval, draws=len(lines))
        )  # fmt: skip
    return found[0], found[1]


def stream_growth(effort: Effort) -> Evidence:
    """Growth of the squared stream for each layer, against Xiong's bounds."""
    pre = draws_of(effort, _PRE)
    least, largest = _growth(pre)
    deepest = [line[-1].sizes for line in pre]
    means = means_of(deepest)
    layers = range(1, DEPTHS[-1] + 1)
    return Evidence(
        measured=(least, largest),
        controls=(
            Control(name="post-norm", measured=_growth(draws_of(effort, _POST))),
            Control(
                name="writes scaled by 1/√(2L), as in GPT-2",
                measured=_growth(draws_of(effort, _PRE, "scaled"))[:1],
            ),
        ),
        finding=(
            f"|x_l|²/d grows by {least.value:.2f} to {largest.value:.2f} for each layer, in all"
            f" layers of stacks of {DEPTHS[0]} to {DEPTHS[-1]}; it ends at {means[-1]:.1f} after"
            f" {DEPTHS[-1]}."
        ),
        plots=(
            Plot(
                title="Growth of the stream with pre-norm at initialisation",
                across="layer l",
                up="mean |x_l|² / d",
                places=tuple(float(layer) for layer in layers),
                curves=(
                    Curve("1 + l/2", tuple(1 + layer / 2 for layer in layers)),
                    Curve("1 + 3l/2", tuple(1 + 1.5 * layer for layer in layers)),
                    Curve("pre-norm", means),
                    Curve("post-norm (control)",
                          means_of([line[-1].sizes for line in draws_of(effort, _POST)])),
                ),
            ),
        ),
    )  # fmt: skip


def profile(effort: Effort) -> Evidence:
    """The gradient of the first layer over that of the last, by depth."""
    plain, scaled = (
        [[each.gradients[0] / each.gradients[-1] for each in line] for line in drawn]
        for drawn in (draws_of(effort, _PRE), draws_of(effort, _PRE, "scaled"))
    )
    name = "slope of first / last gradient on depth, pre-norm"
    allowed = (0.35, 0.75)
    measured = _slope(name, plain, allowed)
    means = means_of(plain)
    predicted = tuple(means[0] * (layers / DEPTHS[0]) ** 0.5 for layers in DEPTHS)
    return Evidence(
        measured=(measured,),
        controls=(
            Control(
                name="writes scaled by 1/√(2L), as in GPT-2",
                measured=(_slope(name, scaled, allowed),),
            ),
        ),
        finding=(
            "In a pre-norm stack the first layer's gradient is"
            f" {', '.join(f'{mean:.1f}' for mean in means)} times the last one's at depths"
            f" {', '.join(map(str, DEPTHS))} (as L^{measured.value:.2f})."
        ),
        plots=(
            Plot(
                title="Gradient of the first layer over that of the last, pre-norm",
                across="layers L",
                up="ratio",
                places=tuple(float(layers) for layers in DEPTHS),
                curves=(
                    Curve("L^(1/2)", predicted),
                    Curve("measured", means),
                    Curve("writes scaled (control)", means_of(scaled)),
                ),
                log=(True, True),
            ),
        ),
    )
