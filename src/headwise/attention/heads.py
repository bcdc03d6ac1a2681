"""Heads: split a width into heads, merge them again, share key-value heads over query heads."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import ShapeError

__all__ = ["group_size", "merge_heads", "share_kv_heads", "split_heads"]


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Cut the last axis into heads: ``batch position (head dim) -> batch head position dim``.

    Example:
        >>> split_heads(torch.zeros(2, 5, 12), heads=3).shape
        torch.Size([2, 3, 5, 4])
    """
    if heads < 1 or x.shape[-1] % heads:
        raise ShapeError(
            f"a width of {x.shape[-1]} cannot be split into {heads} heads",
            allowed="a number of heads that divides the width",
        )
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).transpose(-2, -3)


def merge_heads(x: Tensor) -> Tensor:
    """Put heads side by side again: ``batch head position dim -> batch position (head dim)``."""
    return x.transpose(-2, -3).flatten(-2)


def group_size(heads: int, kv_heads: int) -> int:
    """How many query heads read one key-value head: ``heads / kv_heads``.

    Grouped-query attention, Ainslie et al. 2023 (arXiv:2305.13245), section 2.2.
    """
    if kv_heads < 1 or heads % kv_heads:
        raise ShapeError(
            f"{heads} query heads cannot share {kv_heads} key-value heads",
            allowed="a number of key-value heads that divides the number of query heads",
        )
    return heads // kv_heads


def share_kv_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads so that query head h reads kv head ``h // group``.

    Shapes: ``batch kv_head key dim -> batch head key dim`` (each kv head repeated in place, so
    that neighbouring query heads share; never tiled).

    Example:
        >>> kv = torch.arange(2.0).view(1, 2, 1, 1)
        >>> share_kv_heads(kv, heads=4).flatten().tolist()
        [0.0, 0.0, 1.0, 1.0]
    """
    return torch.repeat_interleave(x, group_size(heads, x.shape[1]), dim=1)
