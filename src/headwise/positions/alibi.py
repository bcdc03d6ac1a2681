"""ALiBi: logits lose slope · distance, so that no position has a vector and any length runs.

    bias_h(i, j) = −slope_h · |i − j|

Press et al. 2022 (arXiv:2108.12409), section 3; for head counts that are no power of two, the
authors' code.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError

__all__ = ["alibi", "alibi_bias", "slopes"]


def slopes(heads: int, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """The slope of each head: 2^(−8h/n), h = 1 … n, for n = ``heads`` a power of two; ``head``.

    Otherwise those of the power of two below, then every other slope of twice that power.

    Example:
        >>> [round(1 / s) for s in slopes(6).tolist()]
        [4, 16, 64, 256, 2, 8]
    """
    if heads < 1:
        raise OptionError(
            f"ALiBi for {heads} heads", allowed="1 or more", to_do="give the number of query heads"
        )
    below = 1 << (heads.bit_length() - 1)
    exponents = [8 * (h + 1) / below for h in range(below)]
    exponents += [4 * (2 * h + 1) / below for h in range(heads - below)]
    return torch.exp2(-torch.tensor(exponents, dtype=torch.float64)).to(dtype)


def alibi(slopes: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """−slope · |i − j| as a whole: ``head query key``, after ``batch`` if the positions have one.

    Positions are ``query`` or ``batch query``, ``key`` or ``batch key``.

    Example:
        >>> alibi(slopes(1), torch.tensor([2]), torch.arange(3)).tolist()
        [[[-0.0078125, -0.00390625, -0.0]]]
    """
    _check(slopes)
    distance = (query_positions[..., :, None] - key_positions[..., None, :]).abs()
    return -slopes.to(distance.device)[:, None, None] * distance[..., None, :, :]


def alibi_bias(slopes: Tensor, offset: int = 0) -> Callable[[int, slice, Tensor, range], Tensor]:
    """The bias function of ALiBi for streaming attention, tile by tile: ``head query key``.

    ``offset`` is the position of query row 0 minus that of key 0. Only differences of positions
    count, so padding and packed documents need no other numbers.

    Example:
        >>> bias = alibi_bias(slopes(2), offset=1)
        >>> bias(0, slice(0, 1), torch.tensor([0, 1]), range(0, 2)).tolist()
        [[[-0.0625, -0.0], [-0.125, -0.0625]]]
    """
    _check(slopes)
    factor = -slopes

    def bias(batch: int, heads: slice, query: Tensor, key: range) -> Tensor:
        # Differences as whole numbers in floating point: exact below 2^24, and much faster.
        exact = torch.promote_types(slopes.dtype, torch.float32)
        rows = (query + (offset - key.start)).to(exact)
        distance = (rows[:, None] - torch.arange(len(key), dtype=exact, device=query.device)).abs_()
        return distance * factor[heads, None, None].to(query.device)

    return bias


def _check(slopes: Tensor) -> None:
    if slopes.dim() != 1 or not slopes.is_floating_point():
        raise ShapeError(
            f"slopes of shape {tuple(slopes.shape)} and type {slopes.dtype}",
            allowed="one floating point number for each head",
            to_do="take slopes(heads)",
        )
