"""Mass per distance band, read off the kept weights of a strip along skewed views.

Band 0 is distance 0; band b >= 1 holds the distances [2^(b-1), 2^b). In a strip of consecutive
rows the keys at a fixed distance lie on a diagonal, so that a view whose row stride is one longer
than the buffer's turns "distance" into a column: each band is a run of columns of that view.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["add_bands", "band_edges", "band_of"]


def band_edges(keys: int) -> list[int]:
    """Lower edges of the bands that distances below ``keys`` fall into.

    Example:
        >>> band_edges(9)
        [0, 1, 2, 4, 8]
    """
    edges = [0]
    while edges[-1] < keys - 1 and (len(edges) == 1 or 2 * edges[-1] < keys):
        edges.append(max(1, 2 * edges[-1]))
    return edges


def band_of(distance: Tensor) -> Tensor:
    """The band of each distance: 0 for 0, else 1 + floor(log2 distance).

    Example:
        >>> band_of(torch.tensor([0, 1, 2, 3, 4, 7, 8])).tolist()
        [0, 1, 2, 2, 3, 3, 4]
    """
    edges = torch.tensor([1 << b for b in range(48)], device=distance.device)
    return torch.bucketize(distance, edges, right=True)


def add_bands(
    target: Tensor,
    weights: Tensor,
    group: int,
    start: int,
    position: Tensor,
    first: int | None,
    pad: int,
    looks_ahead: bool,
) -> None:
    """Add the band masses of a run of keys to ``target`` (``head row band``).

    ``weights`` is ``(head row) key``, a view into a buffer with at least ``pad`` zero columns on
    both sides; ``start`` is its first key; ``position`` are the rows' positions, which are
    consecutive when ``first`` is given.
    """
    rows = position.numel()
    width = weights.shape[1]
    if first is None or rows > pad:
        _scatter(target, weights, group, start, position)
        return
    bands = target.shape[-1]
    _skewed(target, weights, group, first - start, rows, width, pad, bands, ahead=False)
    if looks_ahead:
        _skewed(target, weights, group, first - start, rows, width, pad, bands, ahead=True)


def _skewed(
    target: Tensor,
    weights: Tensor,
    group: int,
    diagonal: int,
    rows: int,
    width: int,
    pad: int,
    bands: int,
    *,
    ahead: bool,
) -> None:
    """Bands on one side of the diagonal; ``diagonal`` is the column of row 0's own key."""
    stride = weights.stride(0)
    base = weights.storage_offset()

    def view(column: int, columns: int) -> Tensor:
        """Row x starts at ``column + x``: ``head row columns``."""
        return weights.as_strided(
            (group, rows, columns), (rows * stride, stride + 1, 1), base + column
        )

    lowest, highest = -pad, width + pad - rows + 1  # what a skewed view may touch, end exclusive
    near = pad
    # Distances 0..near-1 at once: a matrix product with the indicator of the bands.
    a, b = (diagonal + 1, diagonal + near) if ahead else (diagonal - near + 1, diagonal + 1)
    cut_a, cut_b = max(a, lowest), min(b, highest)
    if cut_a < cut_b:
        span = (cut_a - diagonal, cut_b - diagonal)
        which = _indicator(*span, bands, weights.dtype, weights.device)
        skew = view(cut_a, cut_b - cut_a)
        for head in range(group):
            target[head].addmm_(skew[head], which)
    low = near
    while low <= (width - diagonal if ahead else diagonal + rows):
        band = low.bit_length()
        if band >= bands:
            break
        if ahead:
            a, b = diagonal + low, diagonal + 2 * low
        else:
            a, b = diagonal - 2 * low + 1, diagonal - low + 1
        cut_a, cut_b = max(a, lowest), min(b, highest)
        if cut_a < cut_b:
            target[:, :, band] += view(cut_a, cut_b - cut_a).sum(-1)
        low *= 2


@lru_cache(maxsize=64)
def _indicator(a: int, b: int, bands: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Columns at distances |a|..|b - 1| from the diagonal by bands: 1 where they belong."""
    apart = torch.arange(a, b, device=device).abs()
    return torch.nn.functional.one_hot(band_of(apart), 48)[:, :bands].to(dtype)


def _scatter(target: Tensor, weights: Tensor, group: int, start: int, position: Tensor) -> None:
    """Any rows: add every weight to the band of its distance."""
    keys = torch.arange(start, start + weights.shape[1], device=weights.device)
    which = band_of((position[:, None] - keys[None, :]).abs())
    which = which.clamp_(max=target.shape[-1] - 1).expand(group, -1, -1)
    target.scatter_add_(2, which, weights.view(group, position.numel(), -1))
