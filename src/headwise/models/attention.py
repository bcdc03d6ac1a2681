"""Multi-head attention: several attentions side by side, each in its own low-rank subspaces.

    head_m = attention(X W_Q^m, X W_K^m, X W_V^m)
    concatenated   [head_1 … head_h] W_O              ``forward``
    summed         Σ_m A^m X W_V^m W_O^m              ``sum_over_heads``

The two are equal: W_O is cut into the rows that meet each head. So a head is the two products
W_Q^m (W_K^m)ᵀ, which says where it looks, and W_V^m W_O^m, which says what it moves.

Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2; as a sum: Elhage et al. 2021, A Mathematical
Framework for Transformer Circuits; shared keys and values: Shazeer 2019 (arXiv:1911.02150),
Ainslie et al. 2023 (arXiv:2305.13245); norms of queries and keys: Henry et al. 2020
(arXiv:2010.04245); sinks: gpt-oss (arXiv:2508.10925).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headwise.attention.heads import group_size, merge_heads, share_kv_heads, split_heads
from headwise.attention.masks import Causal, Everything, Mask
from headwise.errors import ShapeError
from headwise.models.architecture import Rotary
from headwise.models.cache import Slot
from headwise.models.context import Context
from headwise.models.fused import Attending, compute, weights
from headwise.positions import turn

__all__ = ["MultiHeadAttention"]


class MultiHeadAttention(nn.Module):
    """Attention with h query heads over g key-value heads, built from its four projections.

    Shapes: x ``batch query d_model`` -> the same. ``query`` maps d_model to h·d_head, ``key`` to
    g·d_head, ``value`` to g·d_value, ``output`` h·d_value to d_model; query head m reads kv head
    m // (h/g).

    Args:
        query, key, value, output: the projections, with or without biases.
        heads, kv_heads: h and g.
        mask: who may attend to whom in this layer (causal, a window, everything).
        rotary: positions that turn queries and keys; None: none here.
        query_norm, key_norm: norms of ``batch head position d_head``, before the rotation.
        scale: factor of the dot products; None: d_head^(-1/2).
        softcap: c of c·tanh(s/c).
        sinks: whether each head has a learned logit that only enters the denominator.
        dropout: on the weights, in training only.
        cross: whether keys and values come from another sequence, ``context.source``.

    Raises:
        ShapeError: projections that do not fit the numbers of heads.

    Example:
        >>> parts = [nn.Linear(6, 6, bias=False) for _ in range(4)]
        >>> attention = MultiHeadAttention(*parts, heads=3, kv_heads=3)
        >>> x = torch.randn(1, 5, 6)
        >>> bool(torch.allclose(attention(x), attention.sum_over_heads(x), atol=1e-6))
        True
    """

    def __init__(
        self,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        output: nn.Module,
        *,
        heads: int,
        kv_heads: int,
        mask: Mask | None = None,
        rotary: Rotary | None = None,
        query_norm: nn.Module | None = None,
        key_norm: nn.Module | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        cross: bool = False,
    ) -> None:
        super().__init__()
        group_size(heads, kv_heads)
        self.query, self.key, self.value, self.output = query, key, value, output
        self.query_norm, self.key_norm = query_norm, key_norm
        self.sinks = nn.Parameter(torch.zeros(heads)) if sinks else None
        self.heads, self.kv_heads = heads, kv_heads
        self.d_head = _width_of_heads("query", query, heads)
        self.d_value = _width_of_heads("value", value, kv_heads)
        if _width_of_heads("key", key, kv_heads) != self.d_head:
            raise ShapeError(
                f"keys of width {_out(key) // kv_heads} and queries of width {self.d_head}",
                allowed="one width d_head",
                to_do="give both projections the width of a head times their number of heads",
            )
        self.mask = (Everything() if cross else Causal()) if mask is None else mask
        self.rotary, self.softcap, self.dropout, self.cross = rotary, softcap, dropout, cross
        self.scale = 1 / math.sqrt(self.d_head) if scale is None else scale

    def forward(
        self, x: Tensor, context: Context | None = None, slot: Slot | None = None
    ) -> Tensor:
        """The concatenated form, on the fastest exact path: ``batch query d_model``."""
        call = self.call(x, _alone(x) if context is None else context, slot)
        return self.output(merge_heads(compute(call)))

    def call(self, x: Tensor, context: Context, slot: Slot | None = None) -> Attending:
        """Queries, keys and values as attention uses them, and the rule."""
        q, k, v = self._project(x, context, slot)
        return Attending(
            module=self,
            q=q,
            k=k,
            v=v,
            pattern=self.mask,
            visible=context.source_visible if self.cross else context.visible,
            context=context,
            scale=self.scale,
            softcap=self.softcap,
            bias=None if self.cross else context.bias,
            sinks=self.sinks,
            dropout=self.dropout if self.training else 0.0,
            cross=self.cross,
        )

    def _project(
        self, x: Tensor, context: Context, slot: Slot | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q = split_heads(self.query(x), self.heads)
        if self.query_norm is not None:
            q = self.query_norm(q)
        if self.cross:
            k, v = self._source(context, slot)
            return q.to(v.dtype), k, v
        k = split_heads(self.key(x), self.kv_heads)
        v = split_heads(self.value(x), self.kv_heads)
        if self.key_norm is not None:
            k = self.key_norm(k)
        if self.rotary is not None:
            turns = context.turns(self.rotary)
            q, k = turn(q, turns), turn(k, turns)
        q, k = q.to(v.dtype), k.to(v.dtype)  # under autocast, norms answer in float32
        return (q, k, v) if slot is None else (q, *slot.append(k, v))

    def _source(self, context: Context, slot: Slot | None) -> tuple[Tensor, Tensor]:
        """Keys and values of the other sequence; with a cache, computed once."""
        if slot is not None and slot.source is not None:
            return slot.source
        source = context.source
        if source is None:
            raise ShapeError(
                "cross-attention without a source",
                allowed="a context whose source is (batch, key, d_model)",
                to_do="give the encoder's output",
            )
        k = split_heads(self.key(source), self.kv_heads)
        v = split_heads(self.value(source), self.kv_heads)
        if self.key_norm is not None:
            k = self.key_norm(k).to(v.dtype)
        if slot is not None:
            slot.source = (k, v)
        return k, v

    def weights(self, x: Tensor, context: Context | None = None) -> Tensor:
        """The attention matrices A^m, ``batch head query key``, by the definition."""
        return weights(self.call(x, _alone(x) if context is None else context))

    def head_outputs(self, x: Tensor, context: Context | None = None) -> Tensor:
        """What each head adds to the stream, A^m X W_V^m W_O^m: ``batch head query d_model``.

        With the value's bias, without the output's, which belongs to no head.
        """
        call = self.call(x, _alone(x) if context is None else context)
        moved = weights(call) @ share_kv_heads(call.v, self.heads)
        return torch.einsum("bhqv,dhv->bhqd", moved, self.output_of_heads())

    def sum_over_heads(self, x: Tensor, context: Context | None = None) -> Tensor:
        """Σ_m A^m X W_V^m W_O^m (+ the output's bias): equal to ``forward``, n×n memory."""
        total = self.head_outputs(x, context).sum(1)
        bias = getattr(self.output, "bias", None)
        return total if bias is None else total + bias

    def output_of_heads(self) -> Tensor:
        """W_O cut by heads: ``d_model head d_value``."""
        weight: Tensor = self.output.weight  # type: ignore[assignment]
        return weight.view(weight.shape[0], self.heads, self.d_value)

    def extra_repr(self) -> str:
        return f"heads={self.heads}, kv_heads={self.kv_heads}, mask={self.mask}"


def _alone(x: Tensor) -> Context:
    """The context of a sequence that stands alone."""
    return Context(x.shape[0], x.shape[1], 0, x.device, x.dtype)


def _out(projection: nn.Module) -> int:
    features = projection.out_features
    assert isinstance(features, int)
    return features


def _width_of_heads(name: str, projection: nn.Module, heads: int) -> int:
    if _out(projection) % heads:
        raise ShapeError(
            f"a {name} projection to {_out(projection)} entries for {heads} heads",
            allowed="a number of heads that divides it",
            to_do="give the width of a head times the number of heads",
        )
    return _out(projection) // heads
