"""Additive biases on the logits, given tile by tile so that no n×n array is needed.

A bias function answers ``bias(batch, heads, query, key)``: the batch index, a slice of heads, the
row indices (0..m-1, not positions) as a LongTensor, and a range of keys. Its answer broadcasts to
``head query key`` and is added after scale and softcap; it may hold -inf to hide pairs.

Press et al. 2022 (arXiv:2108.12409), section 3 (ALiBi); Raffel et al. 2020 (arXiv:1910.10683),
section 2.1 (relative position buckets).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError

__all__ = ["BiasFunction", "add_to_gradient", "as_function", "refuse_learned_function"]

BiasFunction = Callable[[int, slice, Tensor, range], Tensor]


def as_function(bias: Tensor, batch: int, heads: int, queries: int, keys: int) -> BiasFunction:
    """A bias function that cuts tiles out of a tensor that somebody already has.

    ``bias`` broadcasts to ``batch head query key``.

    Example:
        >>> f = as_function(torch.arange(6.0).view(1, 1, 2, 3), batch=5, heads=7, queries=2, keys=3)
        >>> f(4, slice(3, 7), torch.tensor([1]), range(1, 3)).tolist()
        [[[4.0, 5.0]]]
    """
    whole = four_axes(bias, batch, heads, queries, keys)

    def cut(b: int, heads: slice, query: Tensor, key: range) -> Tensor:
        x = whole[b if whole.shape[0] > 1 else 0]
        x = x[heads] if x.shape[0] > 1 else x
        x = x[:, query.to(x.device)] if x.shape[1] > 1 else x
        return x[:, :, key.start : key.stop] if x.shape[2] > 1 else x

    return cut


def four_axes(bias: Tensor, batch: int, heads: int, queries: int, keys: int) -> Tensor:
    """A view of the bias with the axes ``batch head query key``, each of full size or of size 1."""
    shape = (batch, heads, queries, keys)
    whole = bias if bias.dim() == 4 else bias[(None,) * max(0, 4 - bias.dim())]
    fits = whole.dim() == 4 and all(a in (1, b) for a, b in zip(whole.shape, shape, strict=True))
    if not fits:
        raise ShapeError(
            f"a bias of shape {tuple(bias.shape)} for (batch, head, query, key) = {shape}",
            allowed="a shape that broadcasts to it",
        )
    return whole


def add_to_gradient(
    gradient: Tensor, ds: Tensor, b: int, heads: slice, query: slice, key: slice
) -> None:
    """Add one tile of dS (``head query key``) to the gradient of a broadcast bias tensor, in place.

    An axis along which the bias was broadcast has size 1 in ``gradient`` and is summed over.
    """
    spread = [axis for axis in range(3) if gradient.shape[axis + 1] == 1]
    if spread:
        ds = ds.sum(spread, keepdim=True)
    place = gradient[b if gradient.shape[0] > 1 else 0]
    for axis, part in enumerate((heads, query, key)):
        if axis not in spread:
            place = place.narrow(axis, part.start, part.stop - part.start)
    place.add_(ds)


def refuse_learned_function(bias: BiasFunction, device: torch.device) -> None:
    """Say so before computing when a bias function hides a tensor whose gradient would be lost."""
    with torch.enable_grad():
        row = torch.zeros(1, dtype=torch.long, device=device)
        learned = bias(0, slice(0, 1), row, range(0, 1)).requires_grad
    if learned:
        raise OptionError(
            "the bias function returns a tensor that requires gradients, which a function of tiles"
            " cannot receive",
            allowed="bias as a tensor that broadcasts to (batch, head, query, key)",
            to_do="pass the tensor itself, or detach it inside the function",
        )
