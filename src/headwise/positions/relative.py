"""T5's relative positions: one learned number for each head and bucket of distances.

Half of the buckets hold one distance each; the others widen like the logarithm up to
``max_distance``, and the last one holds everything beyond. If both directions count, one half of
the buckets is for keys up to the query and the other for keys after it.

Raffel et al. 2020 (arXiv:1910.10683), section 2.1, and the authors' code.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError

__all__ = ["t5_bias", "t5_bias_function", "t5_bucket"]


def t5_bucket(
    relative_position: Tensor,
    *,
    buckets: int = 32,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Tensor:
    """The bucket of each relative position j − i (key minus query); any shape, int64.

    With n buckets in a direction and e = n // 2: distance d < e is bucket d, and from there on
    min(n − 1, e + ⌊(n − e) · ln(d/e) / ln(max_distance/e)⌋). In one direction only, keys after
    the query share bucket 0. Logarithms are float32, as in the code that trained the models.

    Example:
        >>> t5_bucket(torch.tensor([0, -1, -7, -8, -500, 1, 500])).tolist()
        [0, 1, 7, 8, 15, 17, 31]
    """
    each = buckets // 2 if bidirectional else buckets
    exact = each // 2
    if exact < 1 or max_distance <= exact:
        raise OptionError(
            f"{buckets} buckets up to distance {max_distance}",
            allowed=f"at least {4 if bidirectional else 2} buckets, and a distance above {exact}",
            to_do="take the checkpoint's numbers (T5: 32 and 128)",
        )
    if relative_position.is_floating_point() or relative_position.dtype == torch.bool:
        raise ShapeError(
            f"relative positions of type {relative_position.dtype}",
            allowed="whole numbers",
            to_do="subtract integer position ids",
        )
    relative = relative_position.long()
    distance = relative.abs() if bidirectional else (-relative).clamp_min(0)
    # The steps of a division in float32 decide at the edges of buckets: keep their order.
    growth = torch.log(distance.clamp_min(exact).float() / exact)
    growth = growth / math.log(max_distance / exact) * (each - exact)
    far = (exact + growth.long()).clamp_max(each - 1)
    bucket = torch.where(distance < exact, distance, far)
    return bucket + each * (relative > 0) if bidirectional else bucket


def t5_bias(
    table: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
    *,
    max_distance: int = 128,
    bidirectional: bool = True,
) -> Tensor:
    """The bias as a whole, with gradients: ``head query key``, after ``batch`` if there is one.

    ``table`` is ``bucket head``; positions are ``query`` or ``batch query``, ``key`` or
    ``batch key``.

    Example:
        >>> table = torch.arange(8.0).view(8, 1)
        >>> t5_bias(table, torch.tensor([1]), torch.arange(3), max_distance=5).tolist()
        [[[1.0, 0.0, 5.0]]]
    """
    _check(table)
    relative = key_positions[..., None, :] - query_positions[..., :, None]
    bucket = t5_bucket(
        relative,
        buckets=table.shape[0],
        max_distance=max_distance,
        bidirectional=bidirectional,
    )
    return table[bucket.to(table.device)].movedim(-1, -3)


def t5_bias_function(
    table: Tensor, offset: int = 0, *, max_distance: int = 128, bidirectional: bool = True
) -> Callable[[int, slice, Tensor, range], Tensor]:
    """The bias function for streaming attention; O(heads · max_distance) memory at any length.

    ``offset`` is the position of query row 0 minus that of key 0. No gradient reaches ``table``:
    train with the tensor of ``t5_bias``.

    Example:
        >>> bias = t5_bias_function(torch.arange(8.0).view(8, 1), max_distance=5)
        >>> bias(0, slice(0, 1), torch.tensor([1]), range(0, 3)).tolist()
        [[[1.0, 0.0, 5.0]]]
    """
    _check(table)
    # All distances from max_distance on share a bucket, so one line of numbers holds every bias.
    line = t5_bias(
        table.detach(),
        torch.zeros(1, dtype=torch.long),
        torch.arange(-max_distance, max_distance + 1),
        max_distance=max_distance,
        bidirectional=bidirectional,
    )[:, 0]

    def bias(batch: int, heads: slice, query: Tensor, key: range) -> Tensor:
        keys = torch.arange(key.start, key.stop, device=query.device)
        relative = keys - (query + offset)[:, None]
        place = relative.clamp(-max_distance, max_distance) + max_distance
        return line[heads].to(query.device)[:, place]

    return bias


def _check(table: Tensor) -> None:
    if table.dim() != 2 or not table.is_floating_point():
        raise ShapeError(
            f"a table of relative biases of shape {tuple(table.shape)} and type {table.dtype}",
            allowed="floating point numbers (bucket, head)",
            to_do="transpose it if it is (head, bucket)",
        )
