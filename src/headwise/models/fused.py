"""Which exact form computes the attention of a layer. This is the one place that decides.

    torch's fused kernel    no mask, plain causal, one query, or a mask small enough as an array
    streaming attention     softcap, sinks, and masks too large as an array: O(n) memory
    the definition          attention dropout together with what only streaming could do

All give the same numbers up to rounding; the tests tie them to ``attention.definition``. Somebody
who wants to see every call (``headwise.observe``) puts a function into ``WATCHER``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.attention import definition
from headwise.attention.bias import BiasFunction
from headwise.attention.masks import Band, Causal, Everything, Mask
from headwise.attention.streaming import attend
from headwise.models.context import Context

__all__ = ["WATCHER", "Attending", "compute", "output", "weights"]

# Entries of a boolean mask (batch, query, key) up to which it is given to the fused kernel.
ARRAY_LIMIT: Final = 1 << 24


@dataclass(frozen=True, eq=False)
class Attending:
    """One call: q ``batch head query d_head``, k and v ``batch kv_head key dim``, and the rule."""

    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Mask  # the layer's own mask
    visible: Mask | None  # what the batch shows besides
    context: Context
    scale: float
    softcap: float | None = None
    bias: Tensor | BiasFunction | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0
    cross: bool = False

    @property
    def mask(self) -> Mask:
        """Pattern and batch together."""
        if self.visible is None:
            return self.pattern
        whole = isinstance(self.pattern, Everything)
        return self.visible if whole else self.pattern & self.visible

    @property
    def offset(self) -> int:
        """The key position of query row 0."""
        return self.k.shape[2] - self.q.shape[2]


WATCHER: ContextVar[Callable[[Attending], Tensor] | None] = ContextVar("watcher", default=None)


def compute(call: Attending) -> Tensor:
    """Attention output ``batch head query d_value``."""
    watcher = WATCHER.get()
    return output(call) if watcher is None else watcher(call)


def output(call: Attending) -> Tensor:
    """The output by the fastest exact form that can express the call."""
    if call.softcap is None and call.sinks is None and not callable(call.bias):
        simple = _simple(call)
        if simple is not None:
            return _fused(call, *simple)
        if call.q.shape[0] * call.q.shape[2] * call.k.shape[2] <= ARRAY_LIMIT:
            return _fused(call, call.k, call.v, mask=_array(call, call.bias))
    if call.dropout:
        return _dense(call)
    return attend(
        call.q, call.k, call.v, mask=call.mask, scale=call.scale, softcap=call.softcap,
        bias=call.bias, sinks=call.sinks, offset=call.offset,
    )  # fmt: skip


def _simple(call: Attending) -> tuple[Tensor, Tensor, bool] | None:
    """Keys, values and whether it is causal, where no array of a mask is needed; else None."""
    if call.visible is not None or call.bias is not None:
        return None
    k, v, pattern = call.k, call.v, call.pattern
    queries, keys = call.q.shape[2], k.shape[2]
    if isinstance(pattern, Everything):
        return k, v, False
    if isinstance(pattern, Band) and pattern.after == 0:
        if queries == 1:
            first = max(0, keys - 1 - pattern.before)
            return k[:, :, first:], v[:, :, first:], False
        if keys <= pattern.before + 1:
            pattern = Causal()
    if pattern == Causal():
        if queries == 1:
            return k, v, False
        if queries == keys:
            return k, v, True
    return None


def _array(call: Attending, bias: Tensor | None) -> Tensor:
    """The mask as torch's kernel takes it: boolean, or a float bias with -inf where hidden."""
    keep = call.context.block(call.mask, call.k.shape[2])
    if bias is None:
        return keep
    return torch.where(keep, bias.to(call.q.dtype), -torch.inf)


def _fused(
    call: Attending, k: Tensor, v: Tensor, causal: bool = False, mask: Tensor | None = None
) -> Tensor:
    q, (batch, kv_heads) = call.q, k.shape[:2]
    if mask is None and q.shape[2] == 1:
        # One query: the heads that share keys become the rows of one product.
        q = q.reshape(batch, kv_heads, -1, q.shape[3])
    out = functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=call.dropout, is_causal=causal, scale=call.scale,
        enable_gqa=q.shape[1] != kv_heads,
    )  # fmt: skip
    return out if q is call.q else out.view(batch, call.q.shape[1], 1, -1)


def _dense(call: Attending) -> Tensor:
    """The definition, with dropout on its weights: the n×n matrix, once."""
    return definition.output(functional.dropout(weights(call), call.dropout), call.v)


def weights(call: Attending) -> Tensor:
    """The attention matrices ``batch head query key`` of a call, by the definition."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    bias = call.bias
    if callable(bias):
        every = torch.arange(queries, device=call.q.device)
        bias = bias(0, slice(0, call.q.shape[1]), every, range(keys))[None]
    s = definition.scores(call.q, call.k, scale=call.scale, softcap=call.softcap, bias=bias)
    return definition.weights(s, call.context.block(call.mask, keys), call.sinks)
