"""Biases of a call, cut to what is measured: arrays by views, functions by moved indices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from headwise.attention.bias import BiasFunction, as_function
from headwise.observation.tokens import Index, take

__all__ = ["cut", "cut_array", "of_heads", "tiles"]


def cut_array(bias: Tensor, batch: tuple[int, int], rows: Index, keys: Index) -> Tensor:
    """The part of an array that broadcasts to ``batch head query key``; axes of size 1 stay.

    Example:
        >>> bias = torch.arange(12.0).view(1, 1, 3, 4)
        >>> cut_array(bias, (0, 1), slice(1, 3), torch.tensor([0, 3])).tolist()
        [[[[4.0, 7.0], [8.0, 11.0]]]]
    """
    bias = bias if bias.dim() == 4 else bias[(None,) * (4 - bias.dim())]
    if bias.shape[0] > 1:
        bias = bias[slice(*batch)]
    if bias.shape[2] > 1:
        bias = take(bias, 2, rows)
    return take(bias, 3, keys) if bias.shape[3] > 1 else bias


def cut(
    bias: Tensor | BiasFunction, batch: tuple[int, int], rows: Index, keys: Index
) -> Tensor | BiasFunction:
    """The part of a bias for some sequences, rows and keys, in the form it has."""
    if isinstance(bias, Tensor):
        return cut_array(bias, batch, rows, keys)
    whole = bias

    def part(b: int, heads: slice, query: Tensor, key: range) -> Tensor:
        at = rows.to(query.device)[query] if isinstance(rows, Tensor) else query + rows.start
        if not isinstance(keys, Tensor):
            moved = range(key.start + keys.start, key.stop + keys.start)
            return whole(batch[0] + b, heads, at, moved)
        listed = keys[key.start : key.stop]
        first, last = int(listed[0]), int(listed[-1])
        block = whole(batch[0] + b, heads, at, range(first, last + 1))
        return block[..., (listed - first).to(block.device)] if block.shape[-1] > 1 else block

    return part


def of_heads(bias: Tensor | BiasFunction, chosen: Tensor) -> Tensor | BiasFunction:
    """The bias of the heads with these numbers."""
    if isinstance(bias, Tensor):
        return bias[:, chosen.to(bias.device)] if bias.shape[1] > 1 else bias
    whole, numbers = bias, chosen.tolist()

    def part(b: int, heads: slice, query: Tensor, key: range) -> Tensor:
        return torch.cat([whole(b, slice(h, h + 1), query, key) for h in numbers[heads]])

    return part


def tiles(
    bias: Tensor | BiasFunction, ahead: int, shape: tuple[int, int, int, int]
) -> BiasFunction:
    """The bias as a function of tiles, ``ahead`` hidden keys put in front.

    ``shape`` is ``batch head query key``, those keys included.
    """
    if isinstance(bias, Tensor):
        bias = bias.detach()
        if ahead and bias.shape[3] > 1:
            bias = functional.pad(bias, (ahead, 0))
        return as_function(bias, *shape)
    whole = bias

    def moved(b: int, heads: slice, query: Tensor, key: range) -> Tensor:
        if key.stop <= ahead:
            return torch.zeros(1, 1, 1, device=query.device)
        block = whole(b, heads, query, range(max(key.start - ahead, 0), key.stop - ahead))
        missing = max(ahead - key.start, 0)
        return functional.pad(block, (missing, 0)) if missing and block.shape[-1] > 1 else block

    return moved if ahead else whole
