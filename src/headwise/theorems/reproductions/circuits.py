"""Circuits of heads: Kimi K2's QK-clip, induction heads, and the low-rank bottleneck."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor

from headwise.attention.definition import scores, weights
from headwise.models.architecture import Stack
from headwise.models.attention import MultiHeadAttention
from headwise.models.build import build
from headwise.models.context import Context
from headwise.models.presets import decoder_sizes
from headwise.theorems.induction import induction
from headwise.theorems.measured import Measured, exact
from headwise.theorems.statement import Control, Curve, Effort, Evidence, Kind, Plot, Theorem

__all__ = ["THEOREMS"]

_TAU: Final = 100.0
_U: Final = torch.finfo(torch.float64).eps / 2


def _clip(attention: MultiHeadAttention, largest: Tensor, power: float = 0.5) -> None:
    """W_Q and W_K of every head whose largest logit S is above τ, times (τ / S)^power."""
    gamma = (_TAU / largest).clamp(max=1.0).pow(power).repeat_interleave(attention.d_head)
    with torch.no_grad():
        for projection in (attention.query, attention.key):
            projection.weight.mul_(gamma[:, None])  # type: ignore[operator]


def _synthetic(seed: int) -> tuple[MultiHeadAttention, Tensor]:
    """One attention in float64 whose heads 1 and 3 of 5 have logits above τ; and tokens."""
    sizes = decoder_sizes(vocab=7, d_model=65, layers=1, heads=5, d_ff=7, context=31, d_head=14)
    assert isinstance(sizes.decoder, Stack)
    model: Any = build(sizes, seed=seed, dtype=torch.float64)
    attention = next(m for m in model.modules() if isinstance(m, MultiHeadAttention))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 31, 65, generator=generator, dtype=torch.float64)
    wanted = torch.tensor([3.0, 400.0, 90.0, 1000.0, 0.5], dtype=torch.float64)
    factor = (wanted / _largest(attention, x)).sqrt().repeat_interleave(attention.d_head)
    with torch.no_grad():
        for projection in (attention.query, attention.key):
            projection.weight.mul_(factor[:, None])  # type: ignore[operator]
    return attention, x


def _largest(attention: MultiHeadAttention, x: Tensor) -> Tensor:
    """The largest logit of every head over the visible pairs: S_max."""
    call = attention.call(x, Context(1, x.shape[1], 0, x.device, x.dtype))
    keep = attention.mask.dense(0, x.shape[1], x.shape[1], 0)
    s = torch.where(keep, scores(call.q, call.k, scale=call.scale), -math.inf)
    return s.detach().amax((-2, -1))[0]


def _kimi(effort: Effort) -> Evidence:
    def off(power: float) -> tuple[Measured, Measured, Tensor, Tensor]:
        attention, x = _synthetic(effort.seed)
        before, outputs = _largest(attention, x), attention.head_outputs(x).detach()
        _clip(attention, before, power)
        after, changed = _largest(attention, x), attention.head_outputs(x).detach()
        high = before > _TAU
        others = (changed - outputs)[0, ~high].abs().max()
        return (
            exact("largest |S_max − τ| / τ of the clipped heads",
                  float((after[high] - _TAU).abs().max() / _TAU), tolerance=1e-6),
            exact("largest change of the output of other heads", float(others), tolerance=0.0),
            before,
            after,
        )  # fmt: skip

    meets, alone, before, after = off(0.5)
    twice = off(1.0)[0]
    attention, x = _synthetic(effort.seed)
    outputs = attention.head_outputs(x).detach()
    _clip(attention, _largest(attention, x).max().expand(5))
    spilled = (attention.head_outputs(x).detach() - outputs)[0, (before <= _TAU)].abs().max()
    whole = exact("largest change of the output of other heads", float(spilled), tolerance=0.0)
    return Evidence(
        measured=(meets, alone),
        controls=(
            Control(name="γ itself in place of √γ on both", measured=(twice,)),
            Control(name="one γ for the whole layer", measured=(whole,)),
        ),
        finding=(
            f"Largest logits {', '.join(f'{s:.4g}' for s in before.tolist())} become"
            f" {', '.join(f'{s:.4g}' for s in after.tolist())}: the clipped heads stand at τ ="
            f" {_TAU:g} within {meets.value:.1e}, and the outputs of the others keep every bit."
            " The share of heads that were clipped in training is not repeated here."
        ),
    )


def _centred_log(n: int, seed: int) -> Tensor:
    """ln A of a random positive row-stochastic A, less the mean of each row."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand(n, n, generator=generator, dtype=torch.float64) + 0.01
    log = (a / a.sum(-1, keepdim=True)).log()
    return log - log.mean(-1, keepdim=True)


def _truncated(log: Tensor, rank: int) -> float:
    """Largest |softmax(best logits of rank r) − A|: what d_k = r can realise by truncation."""
    left, values, right = torch.linalg.svd(log)
    q, k = left[:, :rank] * values[:rank], right[:rank].T
    logits = scores(q[None, None], k[None, None], scale=1.0)
    return float((weights(logits)[0, 0] - weights(log[None, None])[0, 0]).abs().max())


def _bottleneck(effort: Effort) -> Evidence:
    n = 8
    draws = effort.pick(31, 499)
    logs = [_centred_log(n, effort.seed + i) for i in range(draws)]
    errors = {rank: [_truncated(log, rank) for log in logs] for rank in range(1, n + 1)}
    limit = 1e-12
    enough = [
        exact(f"largest error at d_k = {rank}", max(errors[rank]), tolerance=limit, draws=draws)
        for rank in (n, n - 1)
    ]
    short = exact(f"smallest error at d_k = {n - 2}", min(errors[n - 2]), tolerance=limit)
    low = [sum(found) / draws for found in errors.values()]
    return Evidence(
        measured=tuple(enough),
        controls=(Control(name="one dimension less: d_k = n − 2", measured=(short,)),),
        finding=(
            f"n = {n}: with d_k = {n - 1} every row-stochastic A of {draws} is met within"
            f" {enough[1].value:.1e}; with {n - 2} the largest error is {low[n - 3]:.3f} on average"
            f" ({short.value:.4f} at least), with {n - 3} {low[n - 4]:.3f}."
        ),
        plots=(
            Plot(
                title="Which attention matrices d_k dimensions can make",
                across="d_k",
                up="mean largest error",
                places=tuple(float(rank) for rank in errors),
                curves=(Curve("truncated row-centred ln A", tuple(low)),),
                log=(False, True),
            ),
        ),
    )


THEOREMS: Final = (
    Theorem(
        name="kimi-qk-clip",
        title="QK-clip brings a head's largest logit to τ and leaves the others alone",
        statement=(
            "Where the largest logit S of a head is above τ, multiplying its W_Q and W_K by"
            " √(τ/S) makes it τ; no other head changes."
        ),
        latex=(
            r"\gamma = \min(1, \tau / S_{\max}), \qquad W_Q \leftarrow \sqrt{\gamma}\, W_Q, \quad"
            r" W_K \leftarrow \sqrt{\gamma}\, W_K, \qquad \tau = 100"
        ),
        conditions=("every head has its own keys", "no norm of queries and keys"),
        source="Kimi K2 (arXiv:2507.20534), section 2.1",
        kind=Kind.IDENTITY,
        prediction="S_max = τ within 10⁻⁶; outputs of other heads unchanged to the bit",
        estimator="a synthetic attention of five heads, two of them above τ, in float64",
        random=_kimi,
        reproduces="B9: Kimi K2 2025, QK-clip",
    ),
    Theorem(
        name="olsson-induction",
        title="Induction heads need two layers",
        statement=(
            "Two-layer decoders learn to continue repeated random tokens by a previous-token head"
            " and an induction head; one-layer decoders do not learn it."
        ),
        latex=r"A^{(1)}_{j+1,\,j} \to 1, \qquad A^{(2)}_{i,\,j+1} \to 1 \ \text{where}\ t_j = t_i",
        conditions=("the period varies between sequences", "two layers"),
        source=(
            "Elhage et al. 2021, A Mathematical Framework for Transformer Circuits; Olsson et al."
            " 2022 (arXiv:2209.11895)"
        ),
        kind=Kind.REGULARITY,
        prediction="accuracy above 0.85 with two layers and below 0.5 with one, heads as named",
        estimator="decoders of width 64 trained on 32 tokens with periods of 8 to 16",
        random=induction,
        proof="induction-needs-two-layers",
        reproduces="B10: Elhage et al. 2021, Olsson et al. 2022, induction heads",
    ),
    Theorem(
        name="bhojanapalli-bottleneck",
        title="Below d_k = n − 1 there are attention matrices that no head can make",
        statement=(
            "Every positive row-stochastic n × n matrix is the softmax of logits of rank n − 1,"
            " because the softmax ignores a constant in each row; with rank n − 2 a matrix at"
            " random is missed."
        ),
        latex=r"\mathrm{rank}\big(\ln A\,(I - \tfrac1n \mathbf{1}\mathbf{1}^\top)\big) \le n - 1",
        conditions=("d_k ≥ n − 1",),
        source="Bhojanapalli et al. 2020 (arXiv:2002.07028), theorem 1; n − 1 is derived here",
        kind=Kind.IDENTITY,
        prediction="an error below 10⁻¹² at n − 1",
        estimator="softmax of the row-centred ln A cut to rank d_k, n = 8, random A",
        random=_bottleneck,
        reproduces="B18: Bhojanapalli et al. 2020, low-rank bottleneck",
    ),
)
