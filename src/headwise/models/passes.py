"""What the three kinds of model do alike at the start of a pass."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from headwise.attention.masks import Mask
from headwise.errors import OptionError, ShapeError
from headwise.models.architecture import Architecture
from headwise.models.cache import Cache
from headwise.models.context import Context, as_mask
from headwise.models.embedding import TokenEmbedding

__all__ = ["begin"]


class Begins(Protocol):
    """What a pass asks of a model."""

    architecture: Architecture
    embedding: TokenEmbedding
    allow_long: bool


def begin(
    model: Begins,
    ids: Tensor,
    *,
    position_ids: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    cache: Cache | None = None,
) -> Context:
    """The context of a pass over ``ids``, checked against the length that was trained."""
    if not isinstance(ids, Tensor) or ids.dim() != 2 or not ids.shape[1]:
        is_tensor = isinstance(ids, Tensor)
        raise ShapeError(
            f"token ids of shape {tuple(ids.shape)}" if is_tensor else f"a {type(ids).__name__}",
            allowed="a tensor (batch, position) of one position or more",
            to_do="give one row of ids for each sequence: torch.tensor([ids])",
        )
    batch, queries = ids.shape
    past = 0 if cache is None else cache.length
    keys = past + queries
    if keys > model.architecture.context and not model.allow_long:
        raise OptionError(
            f"a sequence of {keys} tokens for a context of {model.architecture.context}",
            allowed=f"up to {model.architecture.context} tokens",
            to_do="shorten it, or set allow_long = True on the model",
        )
    if position_ids is not None:
        _check_positions(position_ids, batch, queries)
    return Context(
        batch=batch,
        queries=queries,
        past=past,
        device=ids.device,
        dtype=model.embedding.tokens.weight.dtype,
        position_ids=position_ids,
        visible=as_mask(mask, batch, queries, keys),
    )


def _check_positions(position_ids: Tensor, batch: int, queries: int) -> None:
    fits = position_ids.shape in ((queries,), (1, queries), (batch, queries))
    if not fits or position_ids.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"position ids of shape {tuple(position_ids.shape)} and type {position_ids.dtype}"
            f" for ids of shape {(batch, queries)}",
            allowed=f"whole numbers ({queries},) or ({batch}, {queries})",
            to_do="give one position for each token of this pass",
        )
