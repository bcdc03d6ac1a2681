"""The least entropy of a row of attention whose logits have a given size."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import entropy, scores, weights
from headwise.theorems.measured import Measured, exact
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
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS", "attained", "bound", "worst"]

_U: Final = torch.finfo(torch.float64).eps / 2


def bound(size: Tensor, keys: Tensor) -> Tensor:
    """Least entropy of a softmax over n ``keys`` of logits whose centred 2-norm is ``size`` r.

    ln(1 + (n − 1) b) + r √(n (n − 1)) b / (1 + (n − 1) b), b = exp(−r √(n / (n − 1))); n >= 2.
    """
    n = keys.to(size.dtype)
    b = torch.exp(-size * (n / (n - 1)).sqrt())
    mass: Tensor = 1 + (n - 1) * b
    return mass.log() + size * (n * (n - 1)).sqrt() * b / mass


def _centred(s: Tensor, keep: Tensor) -> Tensor:
    """2-norm of every row of logits after its mean over the visible keys was taken off."""
    seen = torch.where(keep, s, 0.0)
    mean = seen.sum(-1, keepdim=True) / keep.sum(-1, keepdim=True)
    return torch.where(keep, s - mean, 0.0).norm(dim=-1)


def _rounding(n: int, largest: float) -> float:
    """n terms a ln a, each wrong by some u (1 + |s|): the bound is exact, the entropy is not."""
    return 8 * n * _U * (1 + largest)


def worst(s: Tensor, keep: Tensor, *, times: float = 1.0) -> tuple[float, float]:
    """The largest bound − entropy over the rows with two visible keys or more, and its tolerance.

    ``times`` shrinks what is taken as the size of the logits: below 1, the bound is too high.
    """
    rows = keep.sum(-1) >= 2
    s, keep = s[..., rows, :], keep[rows]
    h = entropy(weights(s, keep))
    below = bound(times * _centred(s, keep), keep.sum(-1)) - h
    largest = float(torch.where(keep, s, 0.0).abs().max())
    return float(below.max()), _rounding(s.shape[-1], largest)


def _violation(s: Tensor, keep: Tensor, name: str, *, times: float = 1.0) -> Measured:
    value, tolerance = worst(s, keep, times=times)
    return exact(name, max(value, 0.0), tolerance=tolerance)


def _one_high(n: int, size: Tensor) -> Tensor:
    """Rows with one logit above n − 1 equal ones, of these centred norms."""
    row = torch.full((n,), -1.0 / (n - 1), dtype=torch.float64)
    row[0] = 1.0
    rows: Tensor = size[:, None] * row / row.norm()
    return rows


def attained(n: int, sizes: Tensor, rows: Tensor | None = None) -> float:
    """Largest |entropy − bound| over rows of these sizes: one high and the rest equal, if None."""
    s = _one_high(n, sizes) if rows is None else rows
    h = entropy(weights(s))
    return float((h - bound(sizes, torch.full_like(sizes, n))).abs().max())


def _bound(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    draws = effort.pick(499, 9973)
    measured: list[Measured] = []
    controls: list[Measured] = []
    for n in (2, 17, 257):
        s = torch.randn(draws, n, generator=generator, dtype=torch.float64)
        s = s * torch.exp(3 * torch.rand(draws, 1, generator=generator, dtype=torch.float64) - 1)
        heavy = s.sign() * s.abs().pow(3)  # a few logits far above the rest
        keep = torch.ones(draws, n, dtype=torch.bool)
        both = torch.cat((s, heavy))
        measured.append(_violation(both, torch.cat((keep, keep)), f"bound − entropy, n = {n}"))
    sizes = torch.linspace(0.01, 40, 499, dtype=torch.float64)
    name = "one logit high, the rest equal: largest |entropy − bound|"
    for n in (2, 17, 257):
        found = attained(n, sizes)
        measured.append(exact(f"{name}, n = {n}", found, tolerance=_rounding(n, 40.0)))
    near = _one_high(257, sizes)
    every = torch.ones(len(near), 257, dtype=torch.bool)
    controls.append(_violation(near, every, "bound − entropy", times=0.9))
    other = attained(257, sizes, -near)
    measured += _spectral(effort, generator)
    return Evidence(
        measured=tuple(measured),
        controls=(
            Control(name="a size that is 10 % too small", measured=tuple(controls)),
            Control(
                name="one logit low, the rest equal",
                measured=(exact(name, other, tolerance=_rounding(257, 40.0)),),
            ),
        ),
        finding=(
            f"No row of {6 * draws:,} is below the bound by more than"
            f" {max(each.value for each in measured[:3]):.1e}; one high logit attains it within"
            f" {max(each.value for each in measured[3:6]):.1e}."
        ),
        plots=(_plot(sizes),),
    )


def _spectral(effort: Effort, generator: torch.Generator) -> list[Measured]:
    """The same with ‖W_QK‖₂ ‖x_i‖ ‖X‖₂ / √d_k in place of the size of each row."""
    n, d, d_k = effort.pick((61, 23, 7), (257, 61, 13))
    out = []
    for scale in (0.3, 3.0):
        x = torch.randn(n, d, generator=generator, dtype=torch.float64)
        w_q, w_k = (
            scale * torch.randn(d, d_k, generator=generator, dtype=torch.float64) / math.sqrt(d)
            for _ in range(2)
        )
        s = scores((x @ w_q)[None, None], (x @ w_k)[None, None])[0, 0]
        norm = torch.linalg.matrix_norm(w_q @ w_k.T, 2) * torch.linalg.matrix_norm(x, 2)
        size = norm * x.norm(dim=-1) / math.sqrt(d_k)
        below = bound(size, torch.full_like(size, n)) - entropy(weights(s))
        out.append(
            exact(f"bound by spectral norm − entropy, weights × {scale:g}",
                  float(below.max().clamp(min=0)), tolerance=_rounding(n, float(s.abs().max())))
        )  # fmt: skip
    return out


def _plot(sizes: Tensor) -> Plot:
    n, some = 257, sizes[::50]
    keys = torch.full_like(some, n)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(len(some), n, generator=generator, dtype=torch.float64)
    rows = rows - rows.mean(-1, keepdim=True)
    rows = rows / rows.norm(dim=-1, keepdim=True) * some[:, None]
    return Plot(
        title="Entropy of a row of 257 logits against their size",
        across="2-norm of the centred logits",
        up="entropy, nats",
        places=tuple(some.tolist()),
        curves=(
            Curve("bound", tuple(bound(some, keys).tolist())),
            Curve("one high, rest equal", tuple(entropy(weights(_one_high(n, some))).tolist())),
            Curve("normal logits", tuple(entropy(weights(rows)).tolist())),
            Curve("control: size 10 % too small", tuple(bound(0.9 * some, keys).tolist())),
        ),
    )


def _model(model: Trained) -> Evidence:
    layers = [each for each in model.heads if each.sinks is None and each.keep.shape[0] > 1]
    if not layers:
        raise NotApplicable("a learned sink takes part of every row")
    found, wrong, gaps = [], [], []
    for layer in layers:
        name = f"bound − entropy, {layer.module}"
        found.append(_violation(layer.logits, layer.keep, name))
        wrong.append(_violation(layer.logits, layer.keep, name, times=0.1))
        rows = layer.keep.sum(-1) >= 2
        h = entropy(layer.weights())[:, rows]
        low = bound(_centred(layer.logits, layer.keep), layer.keep.sum(-1).clamp(min=2))[:, rows]
        top = layer.keep.sum(-1)[rows].double().log()
        gaps.append(((h - low) / top).mean(-1))
    gap = torch.cat(gaps).sort().values
    first = max(found, key=lambda each: each.value / (each.tolerance or 1.0))
    last = max(wrong, key=lambda each: each.value)
    return Evidence(
        measured=(first,),
        controls=(Control(name="a tenth of the size of the logits", measured=(last,)),),
        finding=(
            f"No row is below the bound. Its distance, over ln n and averaged over a head's rows,"
            f" is {float(gap[len(gap) // 2]):.2f} in the median head ({float(gap[0]):.2g} to"
            f" {float(gap[-1]):.2f}); near 0 a head is as concentrated as its logits allow: one"
            " key far above equal others."
        ),
    )


THEOREMS: Final = (
    Theorem(
        name="entropy-bound",
        title="Small logits keep the entropy up",
        statement=(
            "Among all rows of n logits with a centred 2-norm of r, the softmax has the least"
            " entropy where one logit is high and the others are equal. So the entropy of every row"
            " is bounded below by a decreasing function of r, and r by the spectral norm of W_QK."
        ),
        latex=(
            r"H \;\ge\; \ln\!\big(1 + (n-1)b\big) + \frac{r\sqrt{n(n-1)}\; b}{1 + (n-1) b},"
            r" \qquad b = e^{-r\sqrt{n/(n-1)}}, \qquad"
            r" r \le \|x_i\|\,\|W_{QK}\|_2\,\|X\|_2/\sqrt{d_k}"
        ),
        conditions=("two keys or more are visible", "the whole row is a softmax: no sink"),
        source="Zhai et al. 2023 (arXiv:2303.06296), theorem 3.1",
        kind=Kind.IDENTITY,
        prediction="never violated; attained by one high logit over equal ones",
        estimator="the largest bound − entropy over random and heavy-tailed rows, in float64",
        random=_bound,
        model=_model,
        textbook=(
            Textbook(
                "low entropy is an alarm",
                "a head that attends to one key, such as the first token, has low entropy and is"
                " not ill; the alarm is a fall of the entropy without the sink",
            ),
        ),
        proof="entropy-bound",
    ),
)
