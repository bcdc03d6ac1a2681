"""Checks of rotary positions that are exact: relativity, conventions, precision, whole turns."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.circuits.layer_weights import RotaryUse
from headwise.circuits.rotary import incomplete
from headwise.positions import Layout, frequencies, rotate, rotation
from headwise.theorems.measured import Measured, exact, within
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    NotApplicable,
    Plot,
)
from headwise.theorems.trained import Trained

__all__ = ["conventions", "precision", "relativity", "turns_in", "turns_of"]

_U64: Final = torch.finfo(torch.float64).eps / 2
_U32: Final = torch.finfo(torch.float32).eps / 2
_RELATIVE: Final = "largest |⟨R_p q, R_p' k⟩ − ⟨q, R_(p'−p) k⟩| / |q||k|"


class _Drawn:
    """Random queries and keys ``pair 1 dim`` at random positions ``pair 1``."""

    def __init__(self, effort: Effort, reach: int = 100_003) -> None:
        generator = torch.Generator().manual_seed(effort.seed)
        count, self.width = effort.pick((211, 46), (2003, 134))
        shape = count, 1, self.width
        self.q, self.k = (
            torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2)
        )
        self.p, self.r = (torch.randint(reach, (count, 1), generator=generator) for _ in range(2))
        self.gain = 1 + torch.rand(self.width, generator=generator, dtype=torch.float64)
        self.inv_freq = frequencies(self.width).inv_freq
        # Three rotations by at most `reach` radians, each angle rounded; then d products.
        self.tolerance = (4 * reach + 16 + self.width) * _U64

    def turned(self, x: Tensor, at: Tensor, layout: Layout, base: float = 10_000.0) -> Tensor:
        return rotate(x, at, frequencies(self.width, base=base).inv_freq, layout=layout)

    def error(self, q: Tensor, k: Tensor, layout: Layout = Layout.HALF) -> float:
        """Of turned queries and keys: how far their product is from that of p' − p alone."""
        right = (self.q * self.turned(self.k, self.r - self.p, layout)).sum(-1)
        size = self.q.norm(dim=-1) * self.k.norm(dim=-1)
        return float((((q * k).sum(-1) - right).abs() / size).max())


def relativity(effort: Effort) -> Evidence:
    """⟨R_p q, R_p' k⟩ = ⟨q, R_{p'−p} k⟩, R_p orthogonal, R_a R_b = R_{a+b}."""
    of = _Drawn(effort)
    half = Layout.HALF
    q, k = of.turned(of.q, of.p, half), of.turned(of.k, of.r, half)
    norms = (q.norm(dim=-1) / of.q.norm(dim=-1) - 1).abs().max()
    twice = of.turned(q, of.r, half) - of.turned(of.q, of.p + of.r, half)
    found = of.error(q, k)

    def broken(name: str, q: Tensor, k: Tensor) -> Control:
        return Control(
            name=name, measured=(exact(_RELATIVE, of.error(q, k), tolerance=of.tolerance),)
        )

    bias = torch.ones(of.width, dtype=torch.float64)
    return Evidence(
        measured=(
            exact(_RELATIVE, found, tolerance=of.tolerance),
            exact("largest ||R_p q| / |q| − 1|", float(norms), tolerance=(of.width + 8) * _U64),
            exact(
                "largest |R_a R_b q − R_(a+b) q|",
                float(twice.abs().max()),
                tolerance=of.tolerance * float(of.q.abs().max()),
            ),
        ),
        controls=(
            broken("positions of keys doubled", q, of.turned(of.k, 2 * of.r, half)),
            broken("a gain on keys after the rotation", q, k * of.gain),
            broken("a bias on keys after the rotation", q, k + bias),
            broken("keys turned with another base", q, of.turned(of.k, of.r, half, 500_000.0)),
        ),
        finding=(
            f"Over {len(of.q)} pairs at positions up to {100_003:,}, logits depend on p' − p alone"
            f" to within {found:.1e} of |q||k|."
        ),
    )


def conventions(effort: Effort) -> Evidence:
    """Either place of a pair's members keeps relativity; a mixture of the two does not."""
    of = _Drawn(effort)
    half, interleaved = Layout.HALF, Layout.INTERLEAVED
    turned = {
        layout: (of.turned(of.q, of.p, layout), of.turned(of.k, of.r, layout))
        for layout in (half, interleaved)
    }
    errors = {layout: of.error(*turned[layout], layout) for layout in turned}
    mixed = of.error(turned[interleaved][0], turned[half][1], half)
    size = of.q.norm(dim=-1) * of.k.norm(dim=-1)
    other = (turned[half][0] * turned[half][1]).sum(-1)
    other = other - (turned[interleaved][0] * turned[interleaved][1]).sum(-1)
    differ = float((other.abs() / size).max())
    return Evidence(
        measured=tuple(
            exact(f"{_RELATIVE}, {layout}", errors[layout], tolerance=of.tolerance)
            for layout in errors
        ),
        controls=(
            Control(
                name="queries interleaved, keys half",
                measured=(exact(f"{_RELATIVE}, mixed", mixed, tolerance=of.tolerance),),
            ),
            Control(
                name="one convention in place of the other",
                measured=(
                    exact("largest change of a logit / |q||k|", differ, tolerance=of.tolerance),
                ),
            ),
        ),
        finding=(
            f"Both conventions keep relativity ({max(errors.values()):.1e}), a mixture does not"
            f" ({mixed:.2f}); exchanging them moves logits by up to {differ:.2f} of |q||k|, which"
            " relativity cannot notice."
        ),
    )


def _bound(p: float, u: float) -> float:
    """Error of a logit over |q||k|: two angles of at most p radians, and four roundings more."""
    return (2 * p + 8) * u


def precision(effort: Effort) -> Evidence:
    """Angles in float32 against exact ones, as a share of the bound; and in bfloat16."""
    places = (1009, 10_007, 100_003, 1_000_003)
    errors = [_angle_errors(effort, p) for p in places]
    kinds = ("float32", "bfloat16")
    lines = {kind: tuple(each[kind] for each in errors) for kind in kinds}
    bounds = tuple(_bound(p, _U32) for p in places)

    def shares(kind: str) -> tuple[Measured, ...]:
        return tuple(
            within(f"error / (2 p u |q||k|) at p = {p:,}", error / bound, allowed=(0.0, 1.0))
            for p, error, bound in zip(places, lines[kind], bounds, strict=True)
        )

    return Evidence(
        measured=shares("float32"),
        controls=(Control(name="angles in bfloat16", measured=shares("bfloat16")),),
        finding=(
            f"Angles in float32 move logits by up to {lines['float32'][0]:.1e} of |q||k| at p ="
            f" {places[0]:,} and {lines['float32'][-1]:.1e} at {places[-1]:,}; in bfloat16 by"
            f" {lines['bfloat16'][0]:.2f} already at {places[0]:,}."
        ),
        plots=(
            Plot(
                title="Precision of rotary angles",
                across="position p",
                up="largest error / |q||k|",
                places=tuple(float(p) for p in places),
                curves=(
                    Curve("bound, float32", bounds),
                    *(Curve(kind, line) for kind, line in lines.items()),
                ),
                log=(True, True),
            ),
        ),
    )


def _angle_errors(effort: Effort, p: int) -> dict[str, float]:
    """Largest |logit − exact| / |q||k| with angles of a precision, near position p.

    Frequencies are numbers of float32 (24 bits) and positions have 20: their product is exact in
    float64, which is the reference.
    """
    generator = torch.Generator().manual_seed(effort.seed)
    count, width = effort.pick((401, 46), (4001, 134))
    q, k = torch.randn(2, count, 1, width, generator=generator, dtype=torch.float64)
    distance = torch.randint(997, (count, 1), generator=generator)
    keys = p - torch.randint(97, (count, 1), generator=generator)
    theta = frequencies(width).inv_freq.float()
    right = (q * _turned(k, distance.double()[..., None] * theta.double())).sum(-1)
    size = q.norm(dim=-1) * k.norm(dim=-1)
    single = (rotate(q, keys - distance, theta), rotate(k, keys, theta))
    half = [
        _turned(x, (y.bfloat16()[..., None] * theta.bfloat16()).double())
        for x, y in ((q, keys - distance), (k, keys))
    ]
    return {
        name: float(((turned[0] * turned[1]).sum(-1) - right).abs().div(size).max())
        for name, turned in (("float32", single), ("bfloat16", half))
    }


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """x turned by given angles, by the definition."""
    a, b = x.chunk(2, -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


# Width, base, trained length, and the pairs that never complete a turn.
_KNOWN: Final = (
    (128, 1e4, 4096, 18),
    (128, 1e4, 8192, 14),
    (128, 5e5, 4096, 32),
    (128, 5e5, 8192, 29),
)


def turns_of(effort: Effort) -> Evidence:
    """Pairs that never complete a turn: by the rule L θ < 2π, and by adding up real steps."""
    measured, controls = [], []
    for width, base, length, known in _KNOWN:
        inv_freq = frequencies(width, base=base).inv_freq
        use = RotaryUse(inv_freq, width, Layout.HALF)
        counted = int(incomplete(use, length).sum())
        name = f"pairs without a whole turn in {length} positions, base {base:g}"
        measured.append(exact(name, counted, predicted=known, tolerance=0.0))
        walked = int((_angle_walked(inv_freq, length) < 2 * math.pi).sum())
        measured.append(exact(f"{name}, walked", walked, predicted=counted, tolerance=0.0))
        slower = RotaryUse(inv_freq / 4, width, Layout.HALF)
        controls.append(
            exact(name, int(incomplete(slower, length).sum()), predicted=known, tolerance=0.0)
        )
    return Evidence(
        measured=tuple(measured),
        controls=(Control(name="frequencies divided by 4", measured=tuple(controls)),),
        finding=(
            "With 64 pairs and base 10,000, 18 pairs never complete a turn in 4,096 positions and"
            " 14 in 8,192; with base 500,000 it is 32 and 29."
        ),
    )


def _angle_walked(inv_freq: Tensor, length: int) -> Tensor:
    """How far each pair turns over ``length`` steps, from its cosines and sines alone."""
    cos, sin = rotation(torch.arange(length + 1), inv_freq, dtype=torch.float64)
    step = torch.atan2(
        sin[1:] * cos[:-1] - cos[1:] * sin[:-1], cos[1:] * cos[:-1] + sin[1:] * sin[:-1]
    )
    return step.sum(0)


def turns_in(model: Trained) -> Evidence:
    """Pairs of a trained model that never complete a turn within its trained length."""
    turning = [layer.rotary for layer in model.weights.layers if layer.rotary is not None]
    length = model.loaded.context
    if not turning:
        raise NotApplicable("no layer of it has rotary positions")
    if length is None:
        raise NotApplicable("it does not say on how many positions it was trained")
    use = turning[0]
    counted = int(incomplete(use, length).sum())
    moving = use.inv_freq[use.inv_freq > 0]
    walked = int((_angle_walked(moving, length) < 2 * math.pi).sum())
    walked += len(use.inv_freq) - len(moving)
    name = f"pairs without a whole turn in {length} positions"

    def same(value: int) -> Measured:
        return exact(name, value, predicted=counted, tolerance=0.0)

    return Evidence(
        measured=(same(walked),),
        controls=(
            Control(
                name="a single position",
                measured=(same(int((_angle_walked(use.inv_freq, 1) < 2 * math.pi).sum())),),
            ),
        ),
        finding=(
            f"{counted} of {len(use.inv_freq)} pairs never complete a turn in the {length:,}"
            " positions of training: longer texts show them angles that they never saw."
        ),
    )
