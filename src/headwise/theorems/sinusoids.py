"""Sinusoidal positions: a shift is one rotation, which can be learned, and what logits make of it.

PE(p + Δ) = T_Δ PE(p)     PE(p)·PE(p') = Σ_m cos ω_m (p − p')     ‖PE(p)‖² = d/2
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.positions import shift_matrix, sinusoidal
from headwise.theorems.measured import Measured, bootstrap, exact, within
from headwise.theorems.position_tables import extrapolated, position_table
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
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_SOURCE: Final = "Vaswani et al. 2017 (arXiv:1706.03762), section 3.5"
_U64: Final = torch.finfo(torch.float64).eps / 2
_U32: Final = torch.finfo(torch.float32).eps / 2
_EXTRAPOLATES: Final = (0.0, 1e-3)


def _table(ids: Tensor, width: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return sinusoidal(ids, width, dtype=dtype).double()


def _shift(effort: Effort) -> Evidence:
    """Tolerances: an angle pω ≤ p is rounded to within p u; three angles meet in an entry."""
    generator = torch.Generator().manual_seed(effort.seed)
    width, count = effort.pick((46, 31), (514, 211))
    positions = torch.randint(10_007, (count,), generator=generator)
    steps = torch.randint(1, 1009, (effort.pick(5, 17),), generator=generator).tolist()
    largest = int(positions.max()) + max(steps)
    wide, narrow = 4 * (largest + 4) * _U64, 4 * (largest + 4) * _U64 + 4 * _U32

    def far(shift: int, matrix: Tensor, dtype: torch.dtype = torch.float64) -> float:
        moved = _table(positions, width, dtype) @ matrix.T
        return float((_table(positions + shift, width, dtype) - moved).abs().max())

    def orthogonal(matrix: Tensor) -> float:
        return float((matrix @ matrix.T - torch.eye(width, dtype=torch.float64)).abs().max())

    maps = [shift_matrix(width, step) for step in steps]
    composed = maps[0] @ maps[1] - shift_matrix(width, steps[0] + steps[1])
    name = "largest |PE(p + Δ) − T_Δ PE(p)|"
    wrong = exact(name, far(steps[0], shift_matrix(width, steps[0] + 1)), tolerance=wide)
    stretched = shift_matrix(width, steps[0]) * 1.01
    found = max(far(step, matrix) for step, matrix in zip(steps, maps, strict=True))
    rounded = max(far(s, m, torch.float32) for s, m in zip(steps, maps, strict=True))
    return Evidence(
        measured=(
            exact(name, found, tolerance=wide),
            exact(f"{name}, a table in float32", rounded, tolerance=narrow),
            exact("largest |T_Δ T_Δᵀ − I|", max(map(orthogonal, maps)), tolerance=8 * _U64),
            exact("largest |T_a T_b − T_(a+b)|", float(composed.abs().max()), tolerance=wide),
        ),
        controls=(
            Control(name="the map of Δ + 1", measured=(wrong,)),
            Control(
                name="a map that also stretches",
                measured=(
                    exact("largest |T_Δ T_Δᵀ − I|", orthogonal(stretched), tolerance=8 * _U64),
                ),
            ),
        ),
        finding=(
            f"One rotation moves {count} positions up to {largest} by Δ to within {found:.1e}"
            f" ({rounded:.1e} with a table in float32)."
        ),
    )


def _products(effort: Effort) -> Evidence:
    """Tolerance: two angles of at most p, rounded, in each of d terms of size 1."""
    generator = torch.Generator().manual_seed(effort.seed)
    width, count = effort.pick((58, 61), (514, 307))
    positions = torch.randint(10_007, (count,), generator=generator)
    tolerance = 4 * (10_007 + width) * width * _U64
    omega = 10_000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    between = (positions[:, None] - positions[None, :]).double()
    cosines = (between[..., None] * omega).cos().sum(-1)

    def sizes(table: Tensor) -> tuple[Measured, Measured]:
        gram = table @ table.T
        return (
            exact(
                "largest |PE(p)·PE(p') − Σ cos ω(p − p')|",
                float((gram - cosines).abs().max()),
                tolerance=tolerance,
            ),
            exact(
                "largest |‖PE(p)‖² − d/2|",
                float((gram.diagonal() - width / 2).abs().max()),
                tolerance=tolerance,
            ),
        )

    measured = sizes(_table(positions, width))
    one_less = _table(positions, width)[:, :-1]  # an odd width lacks the last cosine
    slowest = 2 * math.pi * 10_000 ** ((width - 2) / width)
    turns = _table(torch.tensor([0]), width)[0, -2:] @ _turn(width, slowest)
    back = exact("after its wavelength, the slowest pair is back", float(turns[1]), predicted=1.0,
                 tolerance=64 * _U64)  # fmt: skip
    wrong = _table(torch.tensor([0]), width)[0, -2:] @ _turn(width, 2 * math.pi * 10_000)
    return Evidence(
        measured=(*measured, back),
        controls=(
            Control(name="an odd width", measured=sizes(one_less)),
            Control(
                name="a wavelength of 10000 · 2π",
                measured=(exact(back.name, float(wrong[1]), predicted=1.0, tolerance=64 * _U64),),
            ),
        ),
        finding=(
            f"Inner products depend on p − p' alone to within {measured[0].value:.1e}, and every"
            f" squared norm is {width / 2:g}; the slowest wavelength is {slowest:,.0f} positions."
        ),
    )


def _turn(width: int, delta: float) -> Tensor:
    """The last pair of the map that shifts by ``delta``, transposed."""
    return shift_matrix(width, delta)[-2:, -2:].T


def _recoverable(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    width, fitted, rows = effort.pick((14, 149, 293), (22, 307, 613))
    sinusoids = _table(torch.arange(rows), width)
    steps = effort.pick((1, 7, 19), (1, 3, 7, 19, 53))
    random = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    errors = [extrapolated(sinusoids, step, fitted) for step in steps]
    others = [extrapolated(random, step, fitted) for step in steps]
    name = "relative error at positions beyond those fitted, Δ = {}"
    return Evidence(
        measured=tuple(
            within(name.format(step), error, allowed=_EXTRAPOLATES)
            for step, error in zip(steps, errors, strict=True)
        ),
        controls=(
            Control(
                name="a table of random numbers",
                measured=tuple(
                    within(name.format(step), error, allowed=_EXTRAPOLATES)
                    for step, error in zip(steps, others, strict=True)
                ),
            ),
        ),
        finding=(
            f"Least squares on p < {fitted} finds maps that hold on p ≥ {fitted} with a relative"
            f" error of {max(errors):.1e}; of a random table, {max(others):.2f}."
        ),
        plots=(
            Plot(
                title="A shift, fitted to small positions, at larger ones",
                across="shift Δ",
                up="relative error",
                places=tuple(float(step) for step in steps),
                curves=(Curve("sinusoids", tuple(errors)), Curve("random table", tuple(others))),
                log=(False, True),
            ),
        ),
    )


def _recoverable_in(model: Trained) -> Evidence:
    table, learned = position_table(model.model)
    rows = len(table)
    fitted = rows * 2 // 3
    steps = (1, 7)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(model.seed))
    errors = [extrapolated(table, step, fitted) for step in steps]
    shuffled = [extrapolated(table[order], step, fitted) for step in steps]
    allowed = _EXTRAPOLATES
    name = "relative error at positions beyond those fitted, Δ = {}"
    pairs = [
        tuple(
            within(name.format(step), error, allowed=allowed)
            for step, error in zip(steps, found, strict=True)
        )
        for found in (errors, shuffled)
    ]
    return Evidence(
        measured=pairs[0],
        controls=(Control(name="its rows in random order", measured=pairs[1]),),
        violated="its positions are learned" if learned and errors[0] > allowed[1] else "",
        finding=(
            f"A linear map fitted to the first {fitted} of {rows} positions misses the next ones by"
            f" {errors[0]:.2g} (Δ = 1) of their size; with rows in random order, {shuffled[0]:.2g}."
        ),
    )


def toeplitz_deviation(matrix: Tensor) -> float:
    """Spread along diagonals over spread of all entries: 0 where only p − p' counts, near 1 else.

    Example:
        >>> toeplitz_deviation(torch.tensor([[0.0, 1.0], [2.0, 0.0]]))
        0.0
    """
    n = len(matrix)
    along = 0.0
    for k in range(1 - n, n):
        line = matrix.diagonal(k)
        along += float((line - line.mean()).square().sum())
    return math.sqrt(along / float((matrix - matrix.mean()).square().sum()))


def _in_logits(effort: Effort) -> Evidence:
    """Tolerance of the exact cases: the rounding of inner products, as in ``_products``."""
    generator = torch.Generator().manual_seed(effort.seed)
    rows, width = effort.pick((97, 46), (211, 94))
    draws = effort.pick(11, 37)
    table = _table(torch.arange(rows), width)
    tolerance = 4 * (rows + width) * width * _U64
    # Commutes with every shift: a rotation of each pair by an angle of its own, as a shift is.
    commuting = shift_matrix(width, 3.7)
    random = [
        torch.randn(width, width, generator=generator, dtype=torch.float64) / math.sqrt(width)
        for _ in range(draws)
    ]

    def deviation(w: Tensor) -> float:
        return toeplitz_deviation(table @ w @ table.T)

    name = "Toeplitz deviation of PE W PEᵀ, {}"
    found = [deviation(w) for w in random]
    plain = deviation(torch.eye(width, dtype=torch.float64))
    commutes = deviation(commuting)
    mean = sum(found) / draws
    interval = bootstrap(found, lambda some: sum(some) / draws, seed=effort.seed)
    usual = (0.7, 1.0)
    return Evidence(
        measured=(
            exact(name.format("W = I"), plain, tolerance=tolerance),
            exact(name.format("W a rotation of each pair"), commutes, tolerance=tolerance),
            within(name.format("W random"), mean, allowed=usual, interval=interval, draws=draws),
        ),
        controls=(
            Control(
                name="a random W where one that commutes with shifts is asked for",
                measured=(exact(name.format("W = I"), found[0], tolerance=tolerance),),
            ),
            Control(
                name="W = I where a random one is asked for",
                measured=(within(name.format("W random"), plain, allowed=usual),),
            ),
        ),
        finding=(
            f"Logits of positions depend on p − p' alone if W_QK commutes with shifts (deviation"
            f" {plain:.0e}); with random W_QK the deviation is {mean:.2f}, as if p − p' said"
            " nothing."
        ),
    )


_LINEAR: Final = Textbook(
    "relative position is linearly available to the model",
    "in PE itself; of the logit (x + PE) W_QK (x' + PE')ᵀ one term in four sees positions alone,"
    " and it depends on p − p' only if W_QK commutes with the shifts; after LayerNorm not even the"
    " sum is left",
)
_EVEN: Final = "the width d is even"

THEOREMS: Final = (
    Theorem(
        name="sinusoid-shift",
        title="Moving a sinusoidal position is one rotation",
        statement=(
            "For every Δ there is one orthogonal matrix, a rotation of each pair, that takes the"
            " vector of any position p to that of p + Δ. Rotations of two shifts add up."
        ),
        latex=(
            r"\mathrm{PE}(p+\Delta) = T_\Delta\,\mathrm{PE}(p), \qquad T_\Delta T_\Delta^\top = I,"
            r" \qquad T_a T_b = T_{a+b}"
        ),
        conditions=(_EVEN, "T is made for the same Δ and the same base"),
        source=_SOURCE,
        kind=Kind.IDENTITY,
        prediction="no difference beyond the rounding of angles",
        estimator="the largest difference over random positions and shifts, in float64 and float32",
        random=_shift,
        proof="sinusoids",
    ),
    Theorem(
        name="sinusoid-products",
        title="Inner products of sinusoidal positions see p − p' alone",
        statement=(
            "The inner product of two positions is a sum of cosines of their difference, and all"
            " positions have the same norm."
        ),
        latex=(
            r"\langle \mathrm{PE}(p), \mathrm{PE}(p')\rangle = \sum_m \cos\omega_m(p-p'), \qquad"
            r" \|\mathrm{PE}(p)\|^2 = d/2"
        ),
        conditions=(_EVEN,),
        source=_SOURCE,
        kind=Kind.IDENTITY,
        prediction="no difference beyond the rounding of angles; a squared norm of d/2",
        estimator="the largest difference over random pairs of positions, in float64",
        random=_products,
        textbook=(
            Textbook(
                "wavelengths run from 2π to 10000 · 2π",
                "the slowest is 2π · 10000^((d−2)/d): 60,611 for d = 512, not 62,832",
            ),
        ),
        proof="sinusoids",
    ),
    Theorem(
        name="sinusoid-recoverable",
        title="A shift can be learned from examples",
        statement=(
            "The map that shifts sinusoidal positions, fitted by least squares to small positions,"
            " also holds for larger ones. A table without this structure has no such map."
        ),
        latex=(
            r"\hat T_\Delta = \arg\min_T \sum_{p < P}"
            r" \|\mathrm{PE}(p+\Delta) - T\,\mathrm{PE}(p)\|^2"
        ),
        conditions=("positions are sinusoids", "more positions than entries of a vector"),
        source=_SOURCE,
        kind=Kind.REGULARITY,
        prediction="a relative error below a thousandth beyond the fitted positions",
        estimator="least squares on two thirds of the positions, tried on the rest",
        random=_recoverable,
        model=_recoverable_in,
        textbook=(_LINEAR,),
        proof="sinusoids",
    ),
    Theorem(
        name="sinusoid-logits",
        title="In the logit, relative position is not simply available",
        statement=(
            "The part PE W_QK PEᵀ of the logits is a function of p − p' if W_QK commutes with the"
            " shifts. For random W_QK it varies as much along diagonals as anywhere."
        ),
        latex=(
            r"\mathrm{PE}(p)^\top W\,\mathrm{PE}(p') = f(p-p') \;\;\text{if}\;\;"
            r" T_\Delta^\top W T_\Delta = W \;\;\forall\,\Delta"
        ),
        conditions=("W_QK commutes with the shifts",),
        source=_SOURCE,
        kind=Kind.REGULARITY,
        prediction="deviation from a Toeplitz matrix: 0 if W commutes, 0.7 to 1 if W is random",
        estimator="spread along diagonals over spread of all entries, over draws of W",
        random=_in_logits,
        textbook=(_LINEAR,),
        proof="sinusoids",
    ),
)
