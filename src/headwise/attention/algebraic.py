"""The statistics of attention by algebra alone: a second, independent implementation.

Every number here comes from calls of streaming attention with other inputs; no tile, no strip and
no weight is looked at. It shares no code with ``statistics.measure``, needs several passes where
that needs one, and is there to check it. Write L(t) for the log-sum-exp of the logits t·s over the
visible keys, L_C for the one over a subset C, and Attn(q, k, v) for the output:

    entropy            L − scale · q·Attn(q, k, k)             values replaced by keys
    Σ a²               exp(L(2) − 2 L(1))
    mass on C          exp(L_C − L)                            the mask narrowed to C
    without the sink   the entropy identity under the narrowed mask
    distance           one value column j on each side of the diagonal
    received by j      exp(ln Σ_i exp(s_ij − L_i))             queries and keys change roles
    visible keys       exp(L(0)), all logits zero
    mean logit         scale · q·Attn(0, k, k)                 the mean visible key
    variance           scale² · qᵀ Attn(0, k, k kᵀ) q − mean²
    maximum            L(t)/t − ln n / t <= max s <= L(t)/t    for every t > 0

Domain: any mask, grouped heads, learned sinks; no softcap and no bias, because the logits must be
bilinear in q and k. Use float64. Memory is O(n · d_head²), time a dozen passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.heads import share_kv_heads
from headwise.attention.masks import Band, Causal, Everything, Mask, Predicate
from headwise.attention.streaming import attend, attend_with_lse

__all__ = ["identities", "maximum_bounds"]


def identities(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    offset: int | None = None,
    sink_keys: int = 1,
    pool: int | None = None,
) -> dict[str, Tensor]:
    """Statistics by name, as ``statistics.measure`` names them, each from its identity above.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head``; per-row results
    ``batch head query``, ``received`` ``batch head key``, ``pooled``
    ``batch head query_block key_block``. A row with no visible key: log-sum-exp -inf, rest NaN.

    Example:
        >>> x = torch.zeros(1, 1, 3, 2, dtype=torch.float64)
        >>> entropy = identities(x, x, mask=Causal())["entropy"]
        >>> [round(h, 4) for h in entropy.exp()[0, 0].tolist()]  # 1, 2, 3 equal keys
        [1.0, 2.0, 3.0]
    """
    p = _Problem(
        q,
        k,
        Everything() if mask is None else mask,
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        k.shape[2] - q.shape[2] if offset is None else offset,
    )
    lse = p.lse()
    total = lse if sinks is None else torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    empty = lse == -math.inf
    on_keys = torch.exp(lse - total)  # the part of the weight that no learned sink takes
    rest = p.narrowed(Predicate(lambda b, i, j: (j >= sink_keys) & (i == i)))
    out = {
        "entropy": on_keys * (p.entropy(lse) + total - lse),
        "entropy_without_sink": rest.entropy(rest.lse()),
        "sum_squares": torch.exp(p.lse(2.0) - 2 * total),
        "null_mass": 1 - on_keys,
        "distance": on_keys * _distance(p, lse),
        "sink_mass": p.mass(Predicate(lambda b, i, j: (j < sink_keys) & (i == i)), total),
        "self_mass": p.mass(Band(0), total),
        "previous_mass": p.mass(Predicate(lambda b, i, j: j == i - 1), total),
        "bands": _bands(p, total),
        **_moments(p),
    }
    for name, x in out.items():
        if name != "visible":
            hidden = empty if x.dim() == empty.dim() else empty[..., None]
            out[name] = x.masked_fill(hidden, math.nan)
    out["log_sum_exp"] = total
    out["received"] = _received(p, total)
    if pool is not None:
        out["pooled"] = _pooled(p, on_keys.masked_fill(empty, 0.0), pool)
    if v is not None:
        plain = attend(q, k, v, mask=p.mask, scale=p.scale, offset=p.offset)
        out["output"] = plain * on_keys.masked_fill(empty, 0.0)[..., None]
    return out


def maximum_bounds(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    offset: int | None = None,
    temperature: float = 1e6,
) -> tuple[Tensor, Tensor]:
    """Bounds of each row's largest logit: L(t)/t − ln n / t and L(t)/t.

    The bounds of the smallest come from −q: min s = −max(−s).

    Example:
        >>> q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
        >>> k = torch.tensor([1.0, 3.0], dtype=torch.float64).view(1, 1, 2, 1)
        >>> low, high = maximum_bounds(q, k, scale=1.0)
        >>> bool(low <= 3.0 <= high), bool(high - low < 1e-6)
        (True, True)
    """
    p = _Problem(
        q,
        k,
        Everything() if mask is None else mask,
        1 / math.sqrt(q.shape[-1]) if scale is None else scale,
        k.shape[2] - q.shape[2] if offset is None else offset,
    )
    high = p.lse(temperature) / temperature
    return high - math.log(k.shape[2]) / temperature, high


@dataclass(frozen=True)
class _Problem:
    """Bilinear logits under a mask, and the few questions that streaming attention answers."""

    q: Tensor
    k: Tensor
    mask: Mask
    scale: float
    offset: int

    def narrowed(self, mask: Mask) -> _Problem:
        return _Problem(self.q, self.k, self.mask & mask, self.scale, self.offset)

    def lse(self, temperature: float = 1.0) -> Tensor:
        """L(t)."""
        scale = self.scale * temperature
        nothing = self.k[..., :1]
        return attend_with_lse(
            self.q, self.k, nothing, mask=self.mask, scale=scale, offset=self.offset
        )[1]

    def average(self, values: Tensor, *, uniform: bool = False) -> Tensor:
        """Σ_j a_ij values_j (``batch kv_head key column``); over equal weights if uniform."""
        q = torch.zeros_like(self.q) if uniform else self.q
        return attend(q, self.k, values, mask=self.mask, scale=self.scale, offset=self.offset)

    def entropy(self, lse: Tensor) -> Tensor:
        """L − Σ_j a_ij s_ij; NaN for an empty row."""
        mean = self.scale * (self.q * self.average(self.k)).sum(-1)
        return (lse - mean).masked_fill(lse == -math.inf, math.nan)

    def mass(self, chosen: Mask, total: Tensor) -> Tensor:
        """The weight on the chosen pairs."""
        return torch.exp(self.narrowed(chosen).lse() - total)

    def columns(self, values: Tensor) -> Tensor:
        """Values ``key column`` for every sequence and kv head."""
        return values.to(self.q.dtype).expand(*self.k.shape[:2], -1, -1)

    @property
    def positions(self) -> Tensor:
        return torch.arange(self.q.shape[2], device=self.q.device) + self.offset


def _distance(p: _Problem, lse: Tensor) -> Tensor:
    """Σ a |i − j|: the mean key on either side of the diagonal, weighted by the mass there."""
    keys = p.columns(torch.arange(p.k.shape[2], device=p.q.device)[:, None])
    position = p.positions.to(p.q.dtype)
    distance = torch.zeros_like(lse)
    for side, sign in ((Causal(), 1), (Predicate(lambda b, i, j: j > i), -1)):
        half = p.narrowed(side)
        distance += p.mass(side, lse) * sign * (position - half.average(keys).squeeze(-1))
    return distance


def _bands(p: _Problem, total: Tensor) -> Tensor:
    """Mass at distance 0, [1, 2), [2, 4), … up to the largest distance there is."""
    furthest = max(int((p.positions - end).abs().max()) for end in (0, p.k.shape[2] - 1))
    edges = [0, *(1 << b for b in range(furthest.bit_length()))]
    stops = [*edges[1:], furthest + 1]

    def ring(low: int, stop: int) -> Predicate:
        return Predicate(lambda b, i, j: ((i - j).abs() >= low) & ((i - j).abs() < stop))

    masses = [p.mass(ring(a, b), total) for a, b in zip(edges, stops, strict=True)]
    return torch.stack(masses, -1)


def _moments(p: _Problem) -> dict[str, Tensor]:
    """Count, mean and variance of the visible logits: averages over equal weights."""
    flat = _Problem(torch.zeros_like(p.q), p.k, p.mask, p.scale, p.offset)
    mean = p.scale * (p.q * p.average(p.k, uniform=True)).sum(-1)
    squares = p.average((p.k[..., :, None] * p.k[..., None, :]).flatten(-2), uniform=True)
    second = torch.einsum(
        "bhqd,bhqde,bhqe->bhq", p.q, squares.unflatten(-1, (p.q.shape[-1], -1)), p.q
    )
    return {
        "visible": flat.lse().exp().round().long(),
        "mean_logit": mean,
        "var_logit": p.scale**2 * second - mean.square(),
    }


def _received(p: _Problem, total: Tensor) -> Tensor:
    """Σ_i exp(s_ij − L_i): keys ask, queries answer, with the bias −L_i."""
    shift = -total.masked_fill(total == -math.inf, 0.0)

    def bias(b: int, heads: slice, query: Tensor, key: range) -> Tensor:
        return shift[b, heads, None, key.start : key.stop]

    turned = Predicate(lambda b, i, j: p.mask.visible(b, j + p.offset, i))
    keys = share_kv_heads(p.k, p.q.shape[1])
    nothing = p.q[..., :1]
    return attend_with_lse(keys, p.q, nothing, mask=turned, scale=p.scale, bias=bias, offset=0)[
        1
    ].exp()


def _pooled(p: _Problem, on_keys: Tensor, pool: int) -> Tensor:
    """Sums of A over blocks: value columns that name the key's block, rows added up by block."""
    block = torch.arange(p.k.shape[2], device=p.q.device) // pool
    masses = p.average(p.columns(torch.nn.functional.one_hot(block))) * on_keys[..., None]
    row = p.positions.div(pool, rounding_mode="floor")
    row = row - row[0]
    out = masses.new_zeros(*masses.shape[:2], int(row[-1]) + 1, masses.shape[-1])
    return out.index_add_(2, row, masses)
