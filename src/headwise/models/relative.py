"""Biases of the logits by distance, as modules of a stack: T5's learned table, ALiBi's slopes."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from headwise.attention.bias import BiasFunction
from headwise.models.context import Context
from headwise.positions import alibi, alibi_bias, slopes, t5_bias, t5_bias_function

__all__ = ["AlibiBias", "RelativeBias"]

# Entries (head, query, key) up to which a bias is an array; beyond, a function of tiles.
_ARRAY_LIMIT: Final = 1 << 24


class RelativeBias(nn.Module):
    """T5's bias: ``weight`` is ``bucket head``; ``1 head query key`` for a context.

    Distances are those of places in the sequence, whatever the position ids, as in T5. At lengths
    where the array would be large, and no gradient is asked for, the bias is a function of tiles.
    """

    def __init__(self, buckets: int, heads: int, *, max_distance: int, bidirectional: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(buckets, heads))
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def forward(self, context: Context) -> Tensor | BiasFunction:
        learned = torch.is_grad_enabled() and self.weight.requires_grad
        if not learned and _too_large(self.weight.shape[1], context):
            return t5_bias_function(
                self.weight,
                context.past,
                max_distance=self.max_distance,
                bidirectional=self.bidirectional,
            )
        return t5_bias(
            self.weight,
            *_places(context),
            max_distance=self.max_distance,
            bidirectional=self.bidirectional,
        )[None]


class AlibiBias(nn.Module):
    """ALiBi's bias −slope_h · |i − j|: ``1 head query key`` for a context; nothing is learned."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, context: Context) -> Tensor | BiasFunction:
        double = context.dtype == torch.float64
        own = slopes(self.heads, dtype=torch.float64 if double else torch.float32)
        own = own.to(context.device)
        if _too_large(self.heads, context):
            return alibi_bias(own, context.past)
        return alibi(own, *_places(context))[None]


def _too_large(heads: int, context: Context) -> bool:
    return heads * context.queries * context.keys > _ARRAY_LIMIT


def _places(context: Context) -> tuple[Tensor, Tensor]:
    key = torch.arange(context.keys, device=context.device)
    return key[context.past :], key
