"""How far the logits of trained heads spread, beside what their queries and keys predict."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

from headwise.theorems.measured import Measured, bootstrap, exact, within
from headwise.theorems.statement import Control, Evidence, NotApplicable
from headwise.theorems.trained import Trained, TrainedHeads

__all__ = [
    "Spread",
    "logit_moments_of",
    "logit_variance_of",
    "quantiles",
    "spread",
    "within_row_of",
]

_SHARES: Final = (0.0, 0.1, 0.5, 0.9, 1.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """One number for every head whose logits are scale · q·k and which sees at least two keys.

    Attributes:
        std: of the logits over all visible pairs. ``row_std``: root mean variance within a row.
        mean: of the logits. ``cosine``: between q and k, mean over the visible pairs.
        isotropic: scale · σ_q σ_k √d with σ² = E|·|²/d, the means not taken off.
        moments: scale · √(tr(S_q S_k) + m_qᵀ S_k m_q + m_kᵀ S_q m_k).
        rows: scale · √(tr(M_q S_k)), M the uncentred second moment: the prediction for rows that
            see every key.
        centre: the larger share of E|q|² and E|k|² that is the square of the mean.
        likeness: the share |m_k|²/E|k|² of the keys.
        missing: √d_k, by which the logits would be larger without the scale.
    """

    std: Tensor
    row_std: Tensor
    mean: Tensor
    cosine: Tensor
    isotropic: Tensor
    moments: Tensor
    rows: Tensor
    centre: Tensor
    likeness: Tensor
    missing: Tensor


def spread(model: Trained) -> Spread:
    """Of every head, over the first tokens of the text.

    Raises:
        NotApplicable: no head has plain logits.
    """
    found = [_spread(layer) for layer in model.heads if layer.plain and len(layer.keep) > 1]
    if not found:
        raise NotApplicable(
            "the logits of its heads are not scale · q·k: a softcap or a bias enters"
        )
    names = [field.name for field in fields(Spread)]
    return Spread(**{name: torch.cat([getattr(each, name) for each in found]) for name in names})


def _spread(layer: TrainedHeads) -> Spread:
    """Of one layer; variances are population ones over the visible pairs."""
    s, keep = layer.logits, layer.keep.double()
    pairs, seen = keep.sum(), keep.sum(1)
    mean = (s * keep).sum((1, 2)) / pairs
    std = (((s - mean[:, None, None]) ** 2 * keep).sum((1, 2)) / pairs).sqrt()
    row_mean = (s * keep).sum(2) / seen.clamp(min=1)
    rows = ((s - row_mean[..., None]) ** 2 * keep).sum(2) / seen.clamp(min=1)
    q, k, d = layer.q, layer.k, layer.q.shape[-1]
    m_q, m_k = q.mean(1), k.mean(1)
    s_q, s_k = (_covariance(x) for x in (q, k))
    square_q, square_k = (x.square().sum(-1).mean(1) for x in (q, k))
    directed = torch.einsum("ha,hab,hb->h", m_q, s_k, m_q)
    both = torch.einsum("hab,hba->h", s_q, s_k)
    moments = both + directed + torch.einsum("ha,hab,hb->h", m_k, s_q, m_k)
    norms = q.norm(dim=-1)[:, :, None] * k.norm(dim=-1)[:, None]
    cosine = (s / layer.scale / norms.clamp(min=torch.finfo(s.dtype).tiny) * keep).sum((1, 2))
    return Spread(
        std=std,
        row_std=rows[:, seen > 1].mean(1).sqrt(),
        mean=mean,
        cosine=cosine / pairs,
        isotropic=layer.scale * (square_q * square_k / d).sqrt(),
        moments=layer.scale * moments.clamp(min=0).sqrt(),
        rows=layer.scale * (both + directed).clamp(min=0).sqrt(),
        centre=torch.maximum(m_q.square().sum(-1) / square_q, m_k.square().sum(-1) / square_k),
        likeness=m_k.square().sum(-1) / square_k,
        missing=torch.full_like(std, math.sqrt(d)),
    )


def _covariance(x: Tensor) -> Tensor:
    centred = x - x.mean(1, keepdim=True)
    return centred.transpose(1, 2) @ centred / x.shape[1]


def quantiles(values: Tensor, digits: int = 2) -> str:
    """The 0, 10, 50, 90 and 100 % quantiles, in words for a finding."""
    found = values.quantile(torch.tensor(_SHARES, dtype=values.dtype)).tolist()
    return "/".join(f"{each:.{digits}f}" for each in found)


def _median(name: str, values: Tensor, allowed: tuple[float, float], seed: int) -> Measured:
    """Median over heads, its interval from resampled heads."""
    heads = values.tolist()
    interval = bootstrap(heads, lambda some: sorted(some)[len(some) // 2], seed=seed, repeats=400)
    return within(
        name, float(values.median()), allowed=allowed, interval=interval, draws=len(heads)
    )


def logit_variance_of(model: Trained) -> Evidence:
    """Spread of every head against σ_q σ_k, the prediction for independent centred coordinates."""
    found = spread(model)
    ratio = found.std / found.isotropic
    name, allowed = "median of std / (σ_q σ_k)", (0.8, 1.25)
    off = float((found.centre > 0.05).double().mean())
    means = f"in {100 * off:.0f} % of heads the mean of q or of k has over 5 % of its mean square"
    return Evidence(
        measured=(_median(name, ratio, allowed, model.seed),),
        controls=(
            Control(
                name="the logits not divided by √d_k",
                measured=(_median(name, ratio * found.missing, allowed, model.seed),),
            ),
        ),
        violated=f"coordinates do not have mean 0: {means}" if off > 0.5 else "",
        finding=(
            f"Quantiles over heads (0/10/50/90/100 %): std {quantiles(found.std)}, over the"
            f" prediction {quantiles(ratio)}, mean logit {quantiles(found.mean, 1)}, mean cosine of"
            f" q and k {quantiles(found.cosine)}; {means}."
        ),
    )


def logit_moments_of(model: Trained) -> Evidence:
    """Spread of every head against the general formula; an identity where all sees all."""
    found = spread(model)
    ratio = found.std / found.moments
    finding = f"Quantiles over heads of std / predicted: {quantiles(ratio, 3)}"
    if all(bool(layer.keep.all()) for layer in model.heads if layer.plain):
        # Two sums of n² and of n terms in float64, each relative to the mean square.
        n = max(len(layer.keep) for layer in model.heads)
        large = float((1 + (found.mean / found.std) ** 2).max())
        unit = torch.finfo(found.std.dtype).eps / 2
        name, tolerance = "largest |std / predicted − 1|", n * n * unit * large
        worst, shifted = (float((x - 1).abs().max()) for x in (ratio, ratio * found.missing))
        return Evidence(
            measured=(exact(name, worst, tolerance=tolerance),),
            controls=(
                Control(
                    name="the logits not divided by √d_k",
                    measured=(exact(name, shifted, tolerance=tolerance),),
                ),
            ),
            finding=finding + "; every query sees every key, so it is an identity.",
        )
    name, allowed = "median of std / predicted", (0.8, 1.2)
    return Evidence(
        measured=(_median(name, ratio, allowed, model.seed),),
        controls=(
            Control(
                name="the logits not divided by √d_k",
                measured=(_median(name, ratio * found.missing, allowed, model.seed),),
            ),
        ),
        finding=finding + "; a mask hides some pairs, so it is an approximation.",
    )


def within_row_of(model: Trained) -> Evidence:
    """Spread within rows against tr(M_q S_k): the keys' own covariance, their mean taken off."""
    found = spread(model)
    ratio = found.row_std / found.rows
    name, allowed = "median of std within rows / predicted", (0.75, 1.25)
    return Evidence(
        measured=(_median(name, ratio, allowed, model.seed),),
        controls=(
            Control(
                name="the logits not divided by √d_k",
                measured=(_median(name, ratio * found.missing, allowed, model.seed),),
            ),
        ),
        finding=(
            f"Quantiles over heads: std within a row {quantiles(found.row_std)}, over that"
            f" predicted by the covariance of the keys {quantiles(ratio)}; the mean key is"
            f" {quantiles(found.likeness)} of the mean square of the keys. Where every query sees"
            " every key the prediction is an identity."
        ),
    )
