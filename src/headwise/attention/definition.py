"""Scaled dot-product attention, by the book. This is the place where attention is defined.

    S = scale · q kᵀ  (+ softcap, + bias)      scores
    A = softmax over the visible keys of S      weights
    O = A v                                     output

Everything here builds the whole ``query key`` matrix and runs in whatever precision it is given
(float64 in the tests). The streaming forms beside it never import it; the tests tie them to it.

Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.1, equation 1. Softcap: Gemma 2
(arXiv:2408.00118), section 2. Learned sinks: gpt-oss (arXiv:2508.10925), section 2.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.attention.heads import share_kv_heads
from headwise.attention.masks import Mask
from headwise.errors import ShapeError

__all__ = ["attention", "entropy", "log_sum_exp", "output", "scores", "weights"]


def scores(
    q: Tensor,
    k: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Logits: s_ij = scale · q_i·k_j, then c·tanh(s/c) if capped, then + bias.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head``, bias broadcasts to the
    result ``batch head query key``. ``scale`` defaults to d_head^(-1/2).

    Example:
        >>> q = k = torch.eye(2).view(1, 1, 2, 2)
        >>> scores(q, k, scale=1.0)[0, 0].tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(
            f"queries have width {q.shape[-1]} and keys {k.shape[-1]}", allowed="one width d_head"
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = scale * (q @ share_kv_heads(k, q.shape[1]).transpose(-1, -2))
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    return s if bias is None else s + bias


def weights(s: Tensor, keep: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """The row-wise softmax over the visible keys: a_ij = exp(s_ij) / Σ_j' exp(s_ij').

    ``keep`` is boolean, True = may attend, and broadcasts to ``batch head query key``. ``sinks``
    (one logit per head) adds exp(sink) to every denominator, so that rows sum to less than one.
    A row with no visible key has weights 0. Masked logits are selected away: a NaN behind the
    mask does not leak.

    Example:
        >>> weights(torch.zeros(1, 1, 1, 4)).flatten().tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    if keep is not None:
        s = torch.where(keep, s, -math.inf)
    top = s.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(s.dtype).view(1, -1, 1, 1))
    top = torch.where(top == -math.inf, torch.zeros_like(top), top)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.to(s.dtype).view(1, -1, 1, 1) - top)
    return e / torch.where(total == 0, torch.ones_like(total), total)


def log_sum_exp(s: Tensor, keep: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """L_i = log Σ_j exp s_ij over the visible keys (and the sink): -inf for an empty row."""
    if keep is not None:
        s = torch.where(keep, s, -math.inf)
    if sinks is not None:
        extra = sinks.to(s.dtype).view(1, -1, 1, 1).expand(*s.shape[:-1], 1)
        s = torch.cat((s, extra), -1)
    return torch.logsumexp(s, -1)


def output(a: Tensor, v: Tensor) -> Tensor:
    """O_i = Σ_j a_ij v_j: row i is a convex combination of the value vectors.

    Shapes: a ``batch head query key``, v ``batch kv_head key d_value``. A weight of exactly 0 hides
    its value even when that value is not finite: 0 · NaN counts as 0 here.
    """
    v = share_kv_heads(v, a.shape[1])
    finite = torch.isfinite(v)
    o = a @ torch.where(finite, v, torch.zeros_like(v))
    reached = (a != 0).to(a.dtype) @ (~finite).to(a.dtype) > 0
    return torch.where(reached, torch.full_like(o, math.nan), o)


def entropy(a: Tensor) -> Tensor:
    """H_i = -Σ_j a_ij ln a_ij in nats, with 0 ln 0 = 0."""
    return -torch.xlogy(a, a).sum(-1)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    offset: int | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v with an implicit mask: the three steps above in one line each.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head``,
    v ``batch kv_head key d_value`` -> ``batch head query d_value``.

    Example:
        >>> from headwise.attention.masks import Causal
        >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> attention(torch.zeros_like(v), torch.zeros_like(v), v, mask=Causal()).flatten().tolist()
        [1.0, 2.0]
    """
    keep = None
    if mask is not None:
        rows = [mask.dense(b, q.shape[2], k.shape[2], offset) for b in range(q.shape[0])]
        keep = torch.stack(rows)[:, None].to(q.device)
    s = scores(q, k, scale=scale, softcap=softcap, bias=bias)
    return output(weights(s, keep, sinks), v)
