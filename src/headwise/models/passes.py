"""What the three kinds of model do alike at the start of a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attention.masks import Mask
from headwise.errors import OptionError, ShapeError
from headwise.models.architecture import Architecture
from headwise.models.context import Context, as_mask

__all__ = ["begin"]


def begin(
    architecture: Architecture,
    ids: Tensor,
    *,
    dtype: torch.dtype,
    position_ids: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    past: int = 0,
    allow_long: bool = False,
) -> Context:
    """The context of a pass over ``ids``, checked against the length that was trained."""
    if ids.dim() != 2:
        raise ShapeError(
            f"token ids of shape {tuple(ids.shape)}",
            allowed="(batch, position)",
            to_do="give one row of ids for each sequence: ids[None]",
        )
    batch, queries = ids.shape
    keys = past + queries
    if keys > architecture.context and not allow_long:
        raise OptionError(
            f"a sequence of {keys} tokens for a context of {architecture.context}",
            allowed=f"up to {architecture.context} tokens",
            to_do="shorten it, or set allow_long = True on the model",
        )
    if position_ids is not None and position_ids.shape not in (
        (queries,),
        (1, queries),
        (batch, queries),
    ):
        raise ShapeError(
            f"position ids of shape {tuple(position_ids.shape)} for ids of {tuple(ids.shape)}",
            allowed=f"({queries},) or ({batch}, {queries})",
            to_do="give one position for each token of this pass",
        )
    return Context(
        batch=batch,
        queries=queries,
        past=past,
        device=ids.device,
        dtype=dtype,
        position_ids=position_ids,
        visible=as_mask(mask, batch, keys),
    )
