"""Scaled dot-product attention: every row of A is a distribution, every output a weighted mean."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import scores, weights
from headwise.theorems.measured import Measured, exact
from headwise.theorems.statement import Control, Effort, Evidence, Kind, Textbook, Theorem
from headwise.theorems.trained import Trained

__all__ = ["THEOREMS"]

_FINDING: Final = "Rows sum to one within {0:.1e}; no output leaves the box of its values by more."


def _sizes(a: Tensor, v: Tensor, keep: Tensor) -> list[Measured]:
    """How far rows are from distributions, and outputs from the box of the visible values.

    ``a`` ``head query key``, ``v`` ``head key d``, ``keep`` ``query key``. Tolerances: n terms
    summed in precision u are wrong by n u at most (notation of Higham 2002, chapter 4).
    """
    u, n = torch.finfo(a.dtype).eps / 2, a.shape[-1]
    outputs = a @ v
    hidden = torch.where(keep, 0.0, torch.inf).to(v.dtype)[:, :, None]
    low = (v[:, None] + hidden).amin(2)
    high = (v[:, None] - hidden).amax(2)
    outside = torch.maximum(low - outputs, outputs - high).clamp(min=0).max()
    largest = float(v.abs().max())
    return [
        exact("largest |Σ_j a_ij − 1|", float((a.sum(-1) - 1).abs().max()), tolerance=(n + 4) * u),
        exact("largest −a_ij", float((-a).max().clamp(min=0)), tolerance=0.0),
        exact("farthest outside the box", float(outside), tolerance=(n + 4) * u * largest),
    ]


def _random(effort: Effort) -> Evidence:
    generator = torch.Generator().manual_seed(effort.seed)
    n, d = effort.pick((67, 13), (257, 31))
    heads = effort.pick(5, 17)
    q, k, v = (torch.randn(heads, n, d, generator=generator, dtype=torch.float64) for _ in range(3))
    keep = torch.ones(n, n, dtype=torch.bool).tril()
    s = scores(q[None], k[None])
    a = weights(s, keep)[0]
    dropped = a * (torch.rand(a.shape, generator=generator) > 0.1) / 0.9
    sigmoid = torch.where(keep, torch.sigmoid(s[0]), 0.0)
    sums, _, box = _sizes(a, v, keep)
    return Evidence(
        measured=tuple(_sizes(a, v, keep)),
        controls=(
            Control(name="dropout on A", measured=(_sizes(dropped, v, keep)[0],)),
            Control(name="a sigmoid in place of the softmax", measured=(_sums(sigmoid),)),
        ),
        finding=_FINDING.format(max(sums.value, box.value)),
    )


def _sums(a: Tensor) -> Measured:
    u = torch.finfo(a.dtype).eps / 2
    largest = float((a.sum(-1) - 1).abs().max())
    return exact("largest |Σ_j a_ij − 1|", largest, tolerance=(a.shape[-1] + 4) * u)


def _own_precision(model: Trained, halved: bool = False) -> Measured:
    """Row sums, added in float64, of a softmax computed in the precision of the model.

    Tolerance: every stored weight is rounded by u of itself, so their sum by u, and the division by
    u more; the denominator is summed in float32 at least, wrong by n u₃₂, and half precision loses
    weights below its smallest number, less than n u₃₂ together.
    """
    dtype, worst, n = model.dtype, 0.0, 0
    for layer in model.heads:
        if layer.sinks is None:
            hidden = ~layer.keep[layer.keep.any(1)]
            s = layer.logits[:, layer.keep.any(1)].to(dtype).masked_fill(hidden, -torch.inf)
            a = torch.softmax(s, -1).double() / (2 if halved else 1)
            worst = max(worst, float((a.sum(-1) - 1).abs().max()))
            n = max(n, a.shape[-1])
    u = torch.finfo(dtype).eps / 2
    sums = min(u, torch.finfo(torch.float32).eps / 2)
    name = f"largest |Σ_j a_ij − 1| in {str(dtype).removeprefix('torch.')}"
    return exact(name, worst, tolerance=2 * u + 2 * (n + 4) * sums)


def _model(model: Trained) -> Evidence:
    found = [layer for layer in model.heads if layer.sinks is None]
    missing = [1 - layer.weights().sum(-1) for layer in model.heads if layer.sinks is not None]
    if not found:
        mean = float(torch.cat([m.flatten() for m in missing]).mean())
        some = model.heads[0].weights()
        return Evidence(
            measured=(_sums(some),),
            controls=(Control(name="half of every weight", measured=(_sums(some / 2),)),),
            violated="a learned sink takes part of every row",
            finding=f"Rows sum to {1 - mean:.3f} on average; the rest is the weight of the sink.",
        )
    rows = [[*_sizes(layer.weights(), layer.v, layer.keep)] for layer in found]
    measured = tuple(max(column, key=lambda each: each.value) for column in zip(*rows, strict=True))
    half = found[0].weights() / 2
    own = _own_precision(model)
    return Evidence(
        measured=(*measured, own),
        controls=(
            Control(
                name="half of every weight",
                measured=(_sums(half), _own_precision(model, halved=True)),
            ),
        ),
        finding=_FINDING.format(max(measured[0].value, measured[2].value))
        + f" In the model's own precision, {str(model.dtype).removeprefix('torch.')}, rows sum to"
        f" one within {own.value:.1e}.",
    )


THEOREMS: Final = (
    Theorem(
        name="convex-combination",
        title="Attention is a weighted mean of values",
        statement=(
            "A is row-stochastic: its entries are at least 0 and every row sums to 1. So every"
            " output is a convex combination of the value vectors that the query may see."
        ),
        latex=(
            r"A_{ij} \ge 0, \qquad \sum_j A_{ij} = 1, \qquad"
            r" \min_{j} v_{jc} \le o_{ic} \le \max_{j} v_{jc}"
        ),
        conditions=(
            "the softmax normalises over the visible keys",
            "every row has a visible key",
            "no dropout on A",
        ),
        source="Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1",
        kind=Kind.IDENTITY,
        prediction="rows sum to 1; outputs lie in the box of the visible values",
        estimator=(
            "the largest deviation over all rows, heads and coordinates, in float64; of a trained"
            " model also the row sums of a softmax in its own precision"
        ),
        random=_random,
        model=_model,
        textbook=(
            Textbook(
                "the output of the layer is a convex combination of its inputs",
                "that of each head is one of its values; W_O and the residual come after it",
            ),
        ),
        proof="convex-combination",
    ),
)
