"""Bins made coarser without loss: neighbouring bins joined, means weighted by their rows."""

from __future__ import annotations

import numpy as np
from torch import Tensor

__all__ = ["coarser_map", "coarser_means", "coarser_rows"]


def coarser_rows(rows: Tensor, factor: int) -> np.ndarray:
    """Counts per bin, ``factor`` neighbouring bins joined: ``(P,) -> (⌈P / factor⌉,)``.

    Example:
        >>> import torch
        >>> coarser_rows(torch.tensor([2, 2, 1]), 2).tolist()
        [4, 1]
    """
    return _groups(rows.detach().cpu().numpy(), factor, -1).sum(-1)


def coarser_means(means: np.ndarray, counts: Tensor, factor: int) -> np.ndarray:
    """Means per bin, ``factor`` neighbouring bins joined: Σ count·mean / Σ count.

    Shapes: ``(H, P)`` and ``(P,) -> (H, ⌈P / factor⌉)``; NaN where nothing was counted.

    Example:
        >>> import torch
        >>> coarser_means(np.array([[1.0, 4.0, 5.0]]), torch.tensor([2, 1, 1]), 2).tolist()
        [[2.0, 5.0]]
    """
    if factor == 1:
        return means
    weights = np.where(np.isnan(means), 0, counts.detach().cpu().numpy())
    total = _groups(np.nan_to_num(means) * weights, factor, -1).sum(-1)
    count = _groups(weights, factor, -1).sum(-1)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def coarser_map(pooled: np.ndarray, rows: Tensor, factor: int) -> np.ndarray:
    """A pooled map, ``factor``×``factor`` blocks joined: keys are summed, queries averaged.

    Shapes: ``(H, Gq, Gk)`` and ``(Gq,) -> (H, ⌈Gq / factor⌉, ⌈Gk / factor⌉)``.
    """
    if factor == 1:
        return pooled
    columns = _groups(pooled, factor, -1).sum(-1)
    across = np.swapaxes(columns, -1, -2)
    heads, keys, queries = across.shape
    joined = coarser_means(across.reshape(heads * keys, queries), rows, factor)
    return np.swapaxes(joined.reshape(heads, keys, -1), -1, -2)


def _groups(values: np.ndarray, factor: int, axis: int) -> np.ndarray:
    """The last axis cut into groups of ``factor``, padded with zeros: ``(..., P/f, f)``."""
    padding = -values.shape[axis] % factor
    padded = np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)])
    return padded.reshape(*values.shape[:-1], -1, factor)
