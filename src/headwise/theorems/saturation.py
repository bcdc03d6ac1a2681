"""What the scale 1/√d_k does to gradients, and what is often said that it does."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.attention.streaming import attend
from headwise.theorems.logit_draws import gaussian
from headwise.theorems.measured import Measured, bootstrap, slope, within
from headwise.theorems.random_energy import DEAD_ROWS, ROWS
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

__all__ = ["THEOREMS"]

_WIDTHS: Final = (17, 61, 251, 1021)
_CLAIMED: Final = (64, 251, 1021, 4093)  # the claim is made of the first
_KEYS: Final = 127
_DEAD: Final = 1e-3  # of the median row with the scale

Table = list[list[Tensor]]  # draw, width: the gradient of every row


def _gradients(generator: torch.Generator, d: int, rows: int, scale: float | None) -> Tensor:
    """Root mean square over coordinates of ∂loss/∂q_i, one number for every query row.

    q, k, v and the gradient that arrives at the output are independent standard normal.
    """
    sizes = (rows, _KEYS, _KEYS, rows)
    q, k, v, g = (gaussian(generator, 1, 1, n, d) for n in sizes)
    q.requires_grad_(True)
    found = torch.autograd.grad((attend(q, k, v, scale=scale) * g).sum(), q)[0]
    return found[0, 0].square().mean(1).sqrt()


def _table(
    generator: torch.Generator, effort: Effort, widths: tuple[int, ...], scaled: bool
) -> Table:
    draws, rows = effort.pick((29, 31), (97, 61))
    scale = None if scaled else 1.0
    return [[_gradients(generator, d, rows, scale) for d in widths] for _ in range(draws)]


def _column(draws: Table, width: int) -> Tensor:
    return torch.cat([draw[width] for draw in draws])


def _rms(rows: Tensor) -> float:
    return float(rows.square().mean().sqrt())


def _slope(draws: Table, widths: tuple[int, ...]) -> float:
    """Of log root mean square on log d_k."""
    return slope([float(d) for d in widths], [_rms(_column(draws, i)) for i in range(len(widths))])


def _slope_within(name: str, draws: Table, allowed: tuple[float, float], seed: int) -> Measured:
    interval = bootstrap(draws, lambda some: _slope(some, _WIDTHS), seed=seed, repeats=400)
    value = _slope(draws, _WIDTHS)
    return within(name, value, allowed=allowed, interval=interval, draws=len(draws))


def _plots(scaled: Table, raw: Table, widths: tuple[int, ...] = _WIDTHS) -> tuple[Plot, ...]:
    places = tuple(float(d) for d in widths)
    tables = {"with the scale": scaled, "without": raw}
    sizes = [
        Curve(f"{word}, {name}", tuple(of(_column(table, i)) for i in range(len(widths))))
        for name, table in tables.items()
        for word, of in (("root mean square", _rms), ("median row", lambda x: float(x.median())))
    ]
    shares = [
        Curve(name, tuple(_dead_share(table, scaled, i) for i in range(len(widths))))
        for name, table in tables.items()
    ]
    return (
        Plot(
            title="Gradient of the queries", across="d_k", up="size of the gradient",
            places=places, curves=tuple(sizes), log=(True, True),
        ),
        Plot(
            title="Rows whose gradient is under a thousandth of the usual one", across="d_k",
            up="share of rows", places=places, curves=tuple(shares), log=(True, False),
        ),
    )  # fmt: skip


def _dead_share(draws: Table, scaled: Table, width: int) -> float:
    threshold = _DEAD * _column(scaled, width).median()
    return float((_column(draws, width) < threshold).double().mean())


def _scale_free(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    scaled = _table(generator, effort, _WIDTHS, scaled=True)
    raw = _table(generator, effort, _WIDTHS, scaled=False)
    name, allowed = "slope of log rms gradient on log d_k", (-0.05, 0.05)
    found = _slope_within(name, scaled, allowed, effort.seed)
    without = _slope_within(name, raw, allowed, effort.seed)
    # Over each row: with the scale no row is far from the median one.
    tail = _column(scaled, len(_WIDTHS) - 1)
    least = float(tail.min() / tail.median())
    other = _column(raw, len(_WIDTHS) - 1)
    bare = float(other.min() / other.median())
    label, range_ = "least row / median row, d_k = 1021", (0.05, 1.0)
    return Evidence(
        measured=(found, within(label, least, allowed=range_, draws=len(scaled))),
        controls=(
            Control(
                name="without the scale",
                measured=(without, within(label, bare, allowed=range_, draws=len(raw))),
            ),
        ),
        finding=(
            f"With 1/√d_k the gradient of q grows like d_k^{found.value:.3f} from d_k = 17 to 1021"
            f" and the least row has {least:.2f} of the median one; without it like"
            f" d_k^{without.value:.2f}, least row {bare:.0e} of the median."
        ),
        plots=_plots(scaled, raw),
    )


def _ratio(
    name: str, draws: Table, scaled: Table, width: int, allowed: tuple[float, float], seed: int
) -> Measured:
    """``rms`` or ``median`` of the rows, over that with the scale; draws of both resampled."""

    def of(rows: Tensor) -> float:
        return _rms(rows) if name.startswith("rms") else float(rows.median())

    def ratio(some: list[tuple[list[Tensor], list[Tensor]]]) -> float:
        ours, theirs = [each[0] for each in some], [each[1] for each in some]
        return of(_column(ours, width)) / of(_column(theirs, width))

    both = list(zip(draws, scaled, strict=True))
    interval = bootstrap(both, ratio, seed=seed, repeats=400)
    return within(name, ratio(both), allowed=allowed, interval=interval, draws=len(both))


def _none_flows(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    scaled = _table(generator, effort, _CLAIMED, scaled=True)
    again = _table(generator, effort, _CLAIMED[:1], scaled=True)
    raw = _table(generator, effort, _CLAIMED, scaled=False)

    def claim(draws: Table) -> tuple[Measured, ...]:
        return tuple(
            _ratio(
                f"{word} row / with the scale, d_k = 64", draws, scaled, 0, (0.0, 0.1), effort.seed
            )
            for word in ("rms", "median")
        )

    rms, median = claim(raw)
    widths = range(len(_CLAIMED))
    dead = "/".join(f"{100 * _dead_share(raw, scaled, i):.0f}" for i in widths)
    ratios = [float(_column(raw, i).median() / _column(scaled, i).median()) for i in widths]
    return Evidence(
        measured=(rms, median),
        controls=(Control(name="with the scale", measured=claim(again)),),
        finding=(
            f"At d_k = 64 the gradient without the scale is {rms.value:.1f} times larger in root"
            f" mean square and {median.value:.1f} times in the median row. At d_k ="
            f" {'/'.join(str(d) for d in _CLAIMED)} {dead} % of the rows are dead and the median"
            f" row has {'/'.join(f'{each:.2g}' for each in ratios)} times the gradient."
        ),
        plots=_plots(scaled, raw, _CLAIMED),
    )


def _heavy_tailed(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    scaled = _table(generator, effort, _WIDTHS, scaled=True)
    again = _table(generator, effort, _WIDTHS, scaled=True)
    raw = _table(generator, effort, _WIDTHS, scaled=False)
    last = len(_WIDTHS) - 1

    def dead(draws: Table) -> Measured:
        shares = [_dead_share([draw], scaled, last) for draw in draws]
        return within(
            "share of dead rows, d_k = 1021", sum(shares) / len(shares), allowed=(0.2, 0.6),
            interval=bootstrap(shares, lambda some: sum(some) / len(some), seed=effort.seed),
            draws=len(shares),
        )  # fmt: skip

    def all_of(draws: Table) -> tuple[Measured, ...]:
        seed = effort.seed
        return (
            dead(draws),
            _ratio(
                "median row / with the scale, d_k = 1021", draws, scaled, last, (0.0, 0.5), seed
            ),
            _ratio(
                "rms row / with the scale, d_k = 1021", draws, scaled, last, (10.0, 100.0), seed
            ),
            _slope_within("slope of log rms gradient on log d_k", draws, (0.15, 0.6), seed),
        )

    found = all_of(raw)
    shares = "/".join(f"{100 * _dead_share(raw, scaled, i):.0f}" for i in range(len(_WIDTHS)))
    return Evidence(
        measured=found,
        controls=(Control(name="with the scale", measured=all_of(again)),),
        finding=(
            f"Without the scale {shares} % of the rows are dead at d_k = 17/61/251/1021, while the"
            f" root mean square is {found[2].value:.0f} times that with the scale at 1021 and the"
            f" median row {found[1].value:.2f} times."
        ),
        plots=_plots(scaled, raw),
    )


_CONDITIONS: Final = (
    "q, k, v and the gradient at the output are independent and normal",
    "d_k is 17 or more",
)

_SCALE_FREE: Final = Theorem(
    name="scale-free-gradient",
    title="With 1/√d_k the gradient of the queries does not depend on d_k",
    statement=(
        "With the scale the root mean square gradient of q is the same at every d_k, and the same"
        " for every row within a small factor."
    ),
    latex=r"\mathrm{rms}\left(\frac{\partial \mathcal{L}}{\partial q}\right) \propto d_k^{\,0}",
    conditions=("logits are divided by √d_k", *_CONDITIONS),
    source="Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1, the reason given for the scale",
    kind=Kind.REGULARITY,
    prediction="slope of log rms gradient on log d_k within 0.05 of 0",
    estimator="backward pass of the streaming attention; bootstrap over draws of q, k, v",
    random=_scale_free,
    proof="scale-free-gradient",
)

_NONE_FLOWS: Final = Theorem(
    name="no-gradient-without-scale",
    title="The textbook claim: without the scale no gradient flows at d_k = 64",
    statement=(
        "The common claim, checked as it is written: at d_k = 64 unscaled logits have a spread of"
        " 8, the softmax is nearly one-hot, its Jacobian nearly 0, and no gradient reaches q."
    ),
    latex=r"\mathrm{rms}\left(\frac{\partial \mathcal{L}}{\partial q}\right)_{\text{unscaled}}"
    r" \ll \mathrm{rms}\left(\frac{\partial \mathcal{L}}{\partial q}\right)_{\text{scaled}}",
    conditions=_CONDITIONS,
    source="the usual account of Vaswani et al. 2017, section 3.2.1",
    kind=Kind.REGULARITY,
    prediction="below a tenth of the gradient with the scale, in mean square and in the median",
    estimator="backward pass of the streaming attention; bootstrap over draws of q, k, v",
    random=_none_flows,
    textbook=(
        Textbook(
            "without 1/√d_k the softmax is near-one-hot at d_k = 64 and no gradient flows",
            "about two keys stay effective and gradients are larger, in the mean and in the median;"
            " what the scale buys is that rows are alike and that d_k does not matter. The median"
            " row dies only for d_k in the thousands",
        ),
    ),
    proof="scale-free-gradient",
    expected="FAILS",
)

_HEAVY: Final = Theorem(
    name="heavy-tailed-gradient",
    title="Without the scale gradients become heavy-tailed: dead rows beside large ones",
    statement=(
        "Without the scale a share of rows that grows with d_k gets no gradient, while the others"
        " get gradients that grow with d_k."
    ),
    latex=r"P\left(\|\partial\mathcal{L}/\partial q_i\| < 10^{-3}\,\mathrm{median}\right)"
    r" \uparrow, \qquad \mathrm{rms} \uparrow \qquad (d_k \uparrow)",
    conditions=("logits are not divided by √d_k", *_CONDITIONS),
    source="random-energy model of a row; measured",
    kind=Kind.REGULARITY,
    prediction="at d_k = 1021, n = 127: 20 to 60 % dead rows, median row below one half and root"
    " mean square 10 to 100 times that with the scale",
    estimator="backward pass of the streaming attention; bootstrap over draws of q, k, v",
    random=_heavy_tailed,
    proof="scale-free-gradient",
)

THEOREMS: Final = (ROWS, _SCALE_FREE, _NONE_FLOWS, _HEAVY, DEAD_ROWS)
