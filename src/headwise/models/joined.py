"""Weights that meet the same input lie side by side in memory, so that one product can read them.

Queries, keys and values read one vector, gate and up another. The parameters stay apart, with their
names; they are views of one piece of memory, which ``joined`` finds again. A model that was moved
or converted since has them apart: everything still works, with one product for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from headwise.models.attention import MultiHeadAttention
from headwise.models.feed_forward import GatedMLP

__all__ = ["join", "joined"]

_Module = TypeVar("_Module", bound=nn.Module)


@torch.no_grad()
def join(model: _Module) -> _Module:
    """Put the weights of every attention and gated feed-forward part side by side, in place.

    Values, names and parameters stay; only where the numbers lie changes. Needs memory for one
    part's weights besides.
    """
    for module in model.modules():
        if isinstance(module, MultiHeadAttention) and not module.cross:
            _place(module.query, module.key, module.value)
        elif isinstance(module, GatedMLP):
            _place(module.gate, module.up)
    return model


def joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The parts as one tensor, row after row, if they lie so in memory; None if they do not.

    Example:
        >>> both = torch.arange(6.0).view(3, 2)
        >>> joined([both[:1], both[1:]]).equal(both), joined([both[1:], both[:1]])
        (True, None)
    """
    tensors = [part for part in parts if part is not None]
    if not tensors or len(tensors) < len(parts):
        return None
    first = tensors[0]
    expected = first.storage_offset()
    for part in tensors:
        alike = (
            part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and part.shape[1:] == first.shape[1:]
            and part.dtype == first.dtype
            and part.is_contiguous()
            and part.storage_offset() == expected
        )
        if not alike:
            return None
        expected += part.numel()
    rows = sum(part.shape[0] for part in tensors)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


def _place(*projections: nn.Module) -> None:
    if not all(type(each) is nn.Linear for each in projections):
        return
    for name in ("weight", "bias"):
        parts = [getattr(each, name) for each in projections]
        if any(part is None or part.dtype != parts[0].dtype for part in parts):
            continue
        memory = torch.cat([part.detach() for part in parts])
        start = 0
        for part in parts:
            part.data = memory[start : start + part.shape[0]]
            start += part.shape[0]
