"""From the raw sums of the strip pass to named statistics: natural logarithms, NaN where undefined.

Every formula here joins two groups of keys, the sinks (whose logits are at hand) and the rest
(whose sums are relative to their own peak), so that neither can drown the other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headwise.attention.plan import LOG2E, RAW
from headwise.attention.state import LN2

if TYPE_CHECKING:
    from headwise.attention.plan import Problem

__all__ = ["name_rows"]


def name_rows(
    raw: Tensor, sink_logits: Tensor, log2_total: Tensor, top_key: Tensor, problem: Problem
) -> dict[str, Tensor]:
    """Statistics of each row, ``batch head row``, from what the strips left behind.

    ``raw`` is ``(raw sums) batch head row``; ``sink_logits`` is ``batch head row sink``, base 2.
    """
    rest = dict(zip(RAW, raw, strict=True))
    dead = log2_total == -math.inf
    total = torch.where(dead, 0.0, log2_total)
    height = torch.where(rest["peak"] == -math.inf, 0.0, rest["peak"])
    share = torch.where(dead | (rest["total"] == 0), 0.0, (height - total).exp2())  # of 2^peak
    a_sink = torch.where(dead[..., None], 0.0, (sink_logits - total[..., None]).exp2())
    some_rest = rest["total"] > 0
    seen = sink_logits != -math.inf
    sink_gap = torch.where(seen, total[..., None] - sink_logits, 0.0)
    mean_x = torch.where(some_rest, rest["weighted"] / rest["total"], 0.0)
    rest_mass = share * rest["total"]
    named = {
        "log_sum_exp": log2_total * LN2,
        "entropy": LN2 * (rest_mass * (total - height - mean_x) + (a_sink * sink_gap).sum(-1)),
        "entropy_without_sink": torch.where(
            some_rest, LN2 * (rest["total"].log2() - mean_x), math.nan
        ),
        "sum_squares": rest["square"] * share * share + a_sink.square().sum(-1),
        "sink_mass": a_sink.sum(-1),
        "null_mass": _null_mass(problem, total),
        "self_mass": rest["self"],
        "previous_mass": rest["previous"],
        "distance": rest["distance"] * share + _sink_distance(a_sink, problem),
    }
    named |= _logits(rest, sink_logits, seen, a_sink, share, top_key)
    return _blank(named, dead, problem)


def _logits(
    rest: dict[str, Tensor],
    sink_logits: Tensor,
    seen: Tensor,
    a_sink: Tensor,
    share: Tensor,
    top_key: Tensor,
) -> dict[str, Tensor]:
    """Extremes, moments and counts of the visible logits; the top weight and its key."""
    count_rest, count_sink = rest["count"], seen.sum(-1)
    count = count_rest + count_sink
    some = count_rest > 0
    peak = torch.where(some, rest["peak"] + rest["largest"], -math.inf)
    top_rest = torch.where(some, share * rest["largest"].exp2(), 0.0)
    least = torch.where(some, rest["peak"] + rest["least"], math.inf)
    mean_rest = torch.where(some, rest["peak"] + rest["sum_x"] / count_rest, 0.0)
    spread_rest = torch.where(
        some, (rest["sum_xx"] - rest["sum_x"].square() / count_rest).clamp(min=0), 0.0
    )
    if sink_logits.shape[-1]:
        peak_sink, where = sink_logits.max(-1)
        least = torch.minimum(least, torch.where(seen, sink_logits, math.inf).amin(-1))
        top_weight = torch.maximum(top_rest, a_sink.amax(-1))
        top_key = torch.where(peak_sink > peak, where, top_key)
        peak = torch.maximum(peak, peak_sink)
    else:
        top_weight = top_rest
    visible_sink = torch.where(seen, sink_logits, 0.0)
    mean_sink = visible_sink.sum(-1) / count_sink.clamp(min=1)
    spread_sink = torch.where(seen, (visible_sink - mean_sink[..., None]).square(), 0.0).sum(-1)
    gap = torch.where(some & (count_sink > 0), mean_sink - mean_rest, 0.0)
    safe = count.clamp(min=1)
    mean = (count_rest * mean_rest + count_sink * mean_sink) / safe
    spread = spread_rest + spread_sink + gap.square() * count_rest * count_sink / safe
    return {
        "max_logit": peak * LN2,
        "min_logit": least * LN2,
        "max_abs_logit": torch.maximum(peak.abs(), least.abs()) * LN2,
        "mean_logit": mean * LN2,
        "var_logit": spread / safe * LN2**2,
        "top_weight": top_weight,
        "top_key": top_key,
        "visible": count.long(),
    }


def _null_mass(problem: Problem, total: Tensor) -> Tensor:
    """The weight on each head's learned sink logit: exp(sink - L)."""
    if problem.sinks is None:
        return torch.zeros_like(total)
    return (problem.sinks.to(total.dtype).view(1, -1, 1) * LOG2E - total).exp2()


def _sink_distance(a_sink: Tensor, problem: Problem) -> Tensor:
    """Σ over the sink keys of a_ij |i - j|."""
    keys = torch.arange(a_sink.shape[-1], device=a_sink.device)
    apart = ((problem.rows + problem.offset)[:, None] - keys).abs().to(a_sink.dtype)
    return (a_sink * apart).sum(-1)


def _blank(named: dict[str, Tensor], dead: Tensor, problem: Problem) -> dict[str, Tensor]:
    """NaN for rows that see nothing, that do not count, and for what has no meaning."""
    empty = named["visible"] == 0
    drop = empty
    if problem.keep is not None:
        drop = drop | ~problem.keep[:, problem.rows][:, None]
    for name, x in named.items():
        if name == "visible":
            continue
        if name == "top_key":
            named[name] = x.masked_fill(drop, -1)
        elif name == "log_sum_exp":
            kept = torch.where(empty & dead, -math.inf, x)
            named[name] = (
                kept if problem.keep is None else kept.masked_fill(drop & ~empty, math.nan)
            )
        else:
            named[name] = x.masked_fill(drop, math.nan)
    if not problem.relative:
        for name in ("distance", "self_mass", "previous_mass"):
            named[name] = torch.full_like(named[name], math.nan)
    return named
