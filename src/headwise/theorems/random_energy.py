"""A row of independent normal logits: its entropy, its Jacobian, and rows that are dead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import entropy, weights
from headwise.theorems.logit_draws import gaussian
from headwise.theorems.measured import Measured, bootstrap, slope, within
from headwise.theorems.statement import (
    Control,
    Curve,
    Effort,
    Evidence,
    Kind,
    NotApplicable,
    Plot,
    Textbook,
    Theorem,
)
from headwise.theorems.trained import Trained, TrainedHeads
from headwise.theorems.trained_spread import quantiles

__all__ = ["DEAD_ROWS", "ROWS"]

_DEAD: Final = 1e-3  # a row is dead when its top weight is closer to 1
_GROUPS: Final = 16  # of rows: the draws behind an interval

Rows = Callable[[torch.Generator, int, int], Tensor]


def _normal(generator: torch.Generator, rows: int, n: int) -> Tensor:
    return gaussian(generator, rows, n)


def _alike(generator: torch.Generator, rows: int, n: int) -> Tensor:
    """The same variance, nine tenths of it common to the whole row."""
    own, common = _normal(generator, rows, n), _normal(generator, rows, 1)
    return math.sqrt(0.1) * own + math.sqrt(0.9) * common


def _uniform(generator: torch.Generator, rows: int, n: int) -> Tensor:
    half = torch.rand(rows, n, generator=generator, dtype=torch.float64) - 0.5
    return math.sqrt(12) * half


def _row_weights(s: Tensor) -> Tensor:
    return weights(s[None, None])[0, 0]


def _critical(n: int) -> float:
    """τ_c = √(2 ln n): where a row of normal logits freezes onto few keys."""
    return math.sqrt(2 * math.log(n))


def _means(values: Tensor) -> list[float]:
    """Means of groups of rows."""
    return [float(part.mean()) for part in values.chunk(_GROUPS)]


def _mean_within(name: str, draws: list[float], allowed: tuple[float, float]) -> Measured:
    return within(
        name, sum(draws) / len(draws), allowed=allowed, draws=len(draws),
        interval=bootstrap(draws, lambda some: sum(some) / len(some)),
    )  # fmt: skip


def _flat(draw: Rows, generator: torch.Generator, rows: int, n: int) -> tuple[Measured, Measured]:
    """Below τ_c: H against ln n − τ²/2 and Σ a² against e^(τ²)/n, at τ = 1."""
    a = _row_weights(draw(generator, rows, n))
    excess = entropy(a) - (math.log(n) - 0.5)
    squares = a.square().sum(1) * n / math.e
    return (
        _mean_within(f"H − (ln n − τ²/2), τ = 1, n = {n}", _means(excess), (-0.06, 0.06)),
        _mean_within(f"Σ a² · n / e^(τ²), τ = 1, n = {n}", _means(squares), (0.85, 1.1)),
    )


def _frozen(draw: Rows, generator: torch.Generator, rows: int, n: int, tau: float) -> Measured:
    """Above τ_c: tr J against τ_c/τ."""
    a = _row_weights(tau * draw(generator, rows, n))
    trace = (1 - a.square().sum(1)) * tau / _critical(n)
    return _mean_within(f"tr J / (τ_c/τ), τ = {tau:g}, n = {n}", _means(trace), (0.7, 1.1))


def _decay(
    draw: Rows, generator: torch.Generator, rows: int, n: int
) -> tuple[Measured, list[float]]:
    """Slope of log tr J on log d_k when τ = √d_k; the same rows at every width."""
    s = draw(generator, rows, n)
    columns = []
    for d in _WIDTHS:
        a = _row_weights(math.sqrt(d) * s)
        columns.append(_means(1 - a.square().sum(1)))
    draws = [list(each) for each in zip(*columns, strict=True)]

    def fitted(some: list[list[float]]) -> float:
        return slope(_WIDTHS, [sum(c) / len(c) for c in zip(*some, strict=True)])

    measured = within(
        f"slope of log tr J on log d_k, n = {n}", fitted(draws), allowed=(-0.6, -0.4),
        interval=bootstrap(draws, fitted, repeats=400), draws=len(draws),
    )  # fmt: skip
    return measured, [sum(column) / len(column) for column in columns]


_WIDTHS: Final = (61.0, 251.0, 1021.0, 4093.0)


def _rows(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    sizes = effort.pick((127, 1021), (127, 1021, 8191))
    rows = effort.pick(1600, 4000)
    flat = [each for n in sizes for each in _flat(_normal, generator, rows, n)]
    # The trace varies more from row to row the sharper the rows are.
    frozen = [_frozen(_normal, generator, 4 * rows, n, tau) for n in sizes for tau in (8.0, 32.0)]
    decay, traces = _decay(_normal, generator, rows, 1021)
    bounded, others = _decay(_uniform, generator, rows // 4, 1021)
    critical = _critical(1021)
    return Evidence(
        measured=(*flat, *frozen, decay),
        controls=(
            Control(
                name="nine tenths of the variance common to the row",
                measured=(
                    _flat(_alike, generator, rows, 127)[0],
                    _frozen(_alike, generator, rows, 1021, 8.0),
                ),
            ),
            Control(name="uniform logits in place of normal ones", measured=(bounded,)),
        ),
        finding=(
            f"With τ = √d_k and n = 1021 the mean trace of the Jacobian is {traces[0]:.3f} at"
            f" d_k = 61 and {traces[-1]:.4f} at 4093 (τ_c/τ: {critical / math.sqrt(61):.3f} and"
            f" {critical / math.sqrt(4093):.4f}): it falls like d_k^{decay.value:.2f}, not"
            " exponentially."
        ),
        plots=(
            Plot(
                title="What is left of the softmax Jacobian without the scale",
                across="d_k",
                up="mean trace",
                places=_WIDTHS,
                curves=(
                    Curve("√(2 ln n / d_k)", tuple(critical / math.sqrt(d) for d in _WIDTHS)),
                    Curve("measured", tuple(traces)),
                    Curve("control: uniform logits", tuple(others)),
                ),
                log=(True, True),
            ),
        ),
    )


def _share_and_trace(
    generator: torch.Generator, rows: int, tau: float, allowed: tuple[tuple[float, float], ...]
) -> tuple[Measured, Measured]:
    """Share of dead rows and median trace among rows of spread τ, n = 127."""
    a = _row_weights(tau * _normal(generator, rows, 127))
    dead = _means((1 - a.amax(1) < _DEAD).double())
    trace = 1 - a.square().sum(1)
    medians = [float(part.median()) for part in trace.chunk(_GROUPS)]
    return (
        _mean_within(f"share of dead rows, τ = {tau:g}", dead, allowed[0]),
        _mean_within(f"median tr J, τ = {tau:g}", medians, allowed[1]),
    )


_ALIVE: Final = ((0.0, 0.01), (0.9, 1.0))
_SATURATED: Final = ((0.5, 1.0), (0.0, 1e-3))


def _dead_rows(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    rows = effort.pick(1600, 16000)
    alive = _share_and_trace(generator, rows, 1.0, _ALIVE)
    saturated = _share_and_trace(generator, rows, 50.0, _SATURATED)
    return Evidence(
        measured=(*alive, *saturated),
        controls=(
            Control(
                name="τ = 50 said to be alive",
                measured=_share_and_trace(generator, rows, 50.0, _ALIVE),
            ),
            Control(
                name="τ = 1 said to be saturated",
                measured=_share_and_trace(generator, rows, 1.0, _SATURATED),
            ),
        ),
        finding=(
            f"At τ = 1 {100 * alive[0].value:.1f} % of the rows are dead and the median trace of J"
            f" is {alive[1].value:.3f}; at τ = 50 rows are saturated:"
            f" {100 * saturated[0].value:.0f} % are dead, median {saturated[1].value:.1e}."
        ),
    )


def _dead(layer: TrainedHeads, factor: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Of every head: the share of dead rows on the first key, of others, and the mean trace.

    Rows with one visible key are left out: their weight is 1 whatever the logits are. With a
    ``factor`` every row of logits gets the spread ``factor`` first.
    """
    s, seen = layer.logits, layer.keep.sum(1)
    if factor != 1:
        visible = layer.keep.double()
        mean = (s * visible).sum(2, keepdim=True) / seen.clamp(min=1)[:, None]
        square = ((s - mean).square() * visible).sum(2, keepdim=True) / seen.clamp(min=1)[:, None]
        s = factor * (s - mean) / square.sqrt().clamp(min=torch.finfo(s.dtype).tiny)
    a = weights(s[None], layer.keep, layer.sinks)[0][:, seen > 1]
    dead = 1 - a.amax(2) < _DEAD
    first = a.argmax(2) == 0
    trace = (1 - a.square().sum(2)).mean(1)
    return (dead & first).double().mean(1), (dead & ~first).double().mean(1), trace


def _dead_rows_of_model(model: Trained) -> Evidence:
    layers = [layer for layer in model.heads if layer.sinks is None and len(layer.keep) > 1]
    if not layers:
        raise NotApplicable(
            "every softmax has a learned sink: a top weight of 1 means another thing"
        )
    sink, other, trace = (
        torch.cat(part) for part in zip(*(_dead(layer) for layer in layers), strict=True)
    )
    _, forced, _ = (
        torch.cat(part) for part in zip(*(_dead(layer, 50.0) for layer in layers), strict=True)
    )
    name = "share of dead rows, top key not the first"

    def share(values: Tensor) -> Measured:
        return _mean_within(name, values.tolist(), (0.0, 0.1))

    found = share(other)
    places = [(layer.module, h) for layer in layers for h in range(len(layer.logits))]
    module, head = places[int(other.argmax())]
    where = f", most of these in head {head} of {module} ({100 * float(other.max()):.0f} %)"
    return Evidence(
        measured=(found,),
        controls=(Control(name="every row with a spread of 50", measured=(share(forced),)),),
        finding=(
            f"{100 * float(sink.mean()):.1f} % of the rows are dead on the first key and"
            f" {100 * found.value:.2f} % on another{where if found.value else ''}. Mean trace of J"
            f" of a head: {quantiles(trace)} (0/10/50/90/100 %)."
        ),
    )


ROWS: Final = Theorem(
    name="random-energy-rows",
    title="A row of normal logits freezes at a spread of √(2 ln n), and only slowly",
    statement=(
        "For a row of n independent normal logits of standard deviation τ and τ_c = √(2 ln n):"
        " below τ_c the entropy is near ln n − τ²/2, below τ_c/2 Σ a² near e^(τ²)/n; above τ_c the"
        " mean trace of the Jacobian tends to τ_c/τ. Without the scale τ = √d_k, so it falls like"
        " d_k^(−1/2)."
    ),
    latex=r"H \approx \ln n - \frac{\tau^2}{2}, \qquad \mathbb{E}\sum_j a_j^2 \approx"
    r" \frac{e^{\tau^2}}{n}, \qquad \mathbb{E}\,\mathrm{tr}\,J \to \frac{\tau_c}{\tau} ="
    r" \sqrt{\frac{2 \ln n}{d_k}}",
    conditions=("the logits of a row are independent", "they are normal", "n is large"),
    source="Derrida 1981 (Physical Review B 24, 2613), random-energy model",
    kind=Kind.REGULARITY,
    prediction="H within 0.06, tr J from 0.7 to 1.1 times τ_c/τ, slope −1/2 on log d_k",
    estimator="means over rows; 99 % bootstrap interval over groups of rows",
    random=_rows,
    textbook=(
        Textbook(
            "logits with a spread of 8 give near-one-hot weights",
            "about two keys remain effective: tr J is 0.3 to 0.5 for n from 128 to 8192",
        ),
    ),
    proof="random-energy-rows",
)

DEAD_ROWS: Final = Theorem(
    name="dead-rows",
    title="Rows that pass no gradient on, and where they look",
    statement=(
        "A row is dead when its top weight is within 0.001 of 1. Of normal logits no row is dead"
        " at a spread of 1 and most are at 50. In a trained model rows may be dead on the first"
        " key, where heads rest; elsewhere few are."
    ),
    latex=r"1 - a_{\max} < 10^{-3} \;\Rightarrow\; \|J\|_2 < 2 \cdot 10^{-3}",
    conditions=("the spread of the logits in a row is near 1", "the first key is set apart"),
    source="the bound of the Jacobian by 2(1 − a_max); Xiao et al. 2023 (arXiv:2309.17453),"
    " section 3.1, for the first key",
    kind=Kind.REGULARITY,
    prediction="under 1 % dead at spread 1; over half at 50; under 10 % off the first key in"
    " a trained model",
    estimator="share of rows, 99 % bootstrap interval over groups of rows or over heads",
    random=_dead_rows,
    model=_dead_rows_of_model,
    proof="random-energy-rows",
)
