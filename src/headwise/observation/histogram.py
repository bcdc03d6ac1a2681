"""Quantiles from histograms with fixed bins: merging two is adding them, exactly.

Each statistic has one scale for all models, so that histograms of different runs can be added: 256
equal bins of a transformed value t(x). A quantile is interpolated inside its bin and clipped to the
exact smallest and largest value. Resolution, as the width of one bin: 1/256 for shares of one;
0.0625 nats for entropies (range 0 to 16); 10 % of the value for effective keys, distances and
logit spreads; 9 % of 1 + |value| for logits.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from headwise.results.records import PROFILED, QUANTILES

__all__ = ["BINS", "bins", "quantiles"]

BINS: Final = 256

# name: (transform, t at the left end of bin 0, t at the right end of the last bin)
_SHARE = ("linear", 0.0, 1.0)
_NATS = ("linear", 0.0, 16.0)
_COUNT = ("log", 0.0, 17.0)  # ln(1 + x), up to 24 million
_SIGNED = ("asinh", -11.0, 11.0)  # up to |x| = 30,000
_SCALES: Final[dict[str, tuple[str, float, float]]] = {
    "entropy": _NATS,
    "entropy_fraction": _SHARE,
    "entropy_without_sink": _NATS,
    "effective_keys": _COUNT,
    "jacobian_trace": _SHARE,
    "top_weight": _SHARE,
    "distance": _COUNT,
    "sink_mass": _SHARE,
    "previous_mass": _SHARE,
    "max_logit": _SIGNED,
    "logit_std": _COUNT,
}
_KINDS: Final = {
    kind: [i for i, name in enumerate(PROFILED) if _SCALES[name][0] == kind]
    for kind in ("linear", "log", "asinh")
}
_LOW: Final = torch.tensor([_SCALES[name][1] for name in PROFILED])
_HIGH: Final = torch.tensor([_SCALES[name][2] for name in PROFILED])


def bins(x: Tensor) -> Tensor:
    """The bin of each value, ``statistic head row``, with statistics in the order of PROFILED."""
    t = x.clone(memory_format=torch.contiguous_format)
    for kind, which in _KINDS.items():
        for i in which:
            if kind == "log":
                t[i].clamp_(min=0).log1p_()
            elif kind == "asinh":
                t[i].asinh_()
    low = _LOW.to(x)[:, None, None]
    per_unit = BINS / (_HIGH.to(x)[:, None, None] - low)
    return t.sub_(low).mul_(per_unit).clamp_(0, BINS - 1).long()


def quantiles(counts: Tensor, least: Tensor, most: Tensor) -> Tensor:
    """Quantiles at QUANTILES: ``statistic head bin`` counts -> ``statistic head quantile``.

    The quantile p of N values is the value of rank p · N, found by linear interpolation within the
    bin. ``least`` and ``most`` (``statistic head``) are exact and are the quantiles 0 and 1.

    Example:
        >>> counts = torch.zeros(11, 1, 256); counts[1, 0, 128] = 10
        >>> q = quantiles(counts, torch.full((11, 1), 0.5), torch.full((11, 1), 0.503))
        >>> 0.5 <= float(q[1, 0, 4]) <= 0.503
        True
    """
    counts = counts.double()
    total = counts.sum(-1, keepdim=True)
    rank = total * torch.tensor(QUANTILES, dtype=torch.float64)
    above = counts.cumsum(-1)
    place = torch.searchsorted(above.contiguous(), rank.contiguous()).clamp(max=BINS - 1)
    inside = counts.gather(-1, place)
    below = above.gather(-1, place) - inside
    share = ((rank - below) / inside.clamp(min=1)).clamp(0, 1)
    low = _LOW.double()[:, None, None]
    width = (_HIGH.double()[:, None, None] - low) / BINS
    t = low + (place + share) * width
    value = torch.empty_like(t)
    for kind, which in _KINDS.items():
        part = t[which]
        if kind == "log":
            part = torch.expm1(part)
        elif kind == "asinh":
            part = torch.sinh(part)
        value[which] = part
    least, most = least.double()[..., None], most.double()[..., None]
    value = torch.minimum(torch.maximum(value, least), most)
    value[..., 0], value[..., -1] = least[..., 0], most[..., 0]
    return torch.where(total > 0, value, torch.full_like(value, math.nan))
