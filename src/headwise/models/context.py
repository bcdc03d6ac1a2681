"""What all layers of one forward pass share: positions, who may be seen, what follows from them.

A ``Context`` is made once per pass and stack. Cosines and sines, and boolean blocks of a mask that
the fused kernel needs as an array, are computed on first use and kept for the other layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.attention.bias import BiasFunction
from headwise.attention.masks import Dense, KeyPadding, Mask
from headwise.errors import ShapeError
from headwise.models.architecture import Rotary
from headwise.positions import Spread, frequencies, rotation, spread

__all__ = ["Context", "as_mask"]


@dataclass
class Context:
    """One pass of ``queries`` positions that stand behind ``past`` cached ones."""

    batch: int
    queries: int
    past: int
    device: torch.device
    dtype: torch.dtype
    position_ids: Tensor | None = None  # (position) or (batch, position); None: past, past + 1, …
    visible: Mask | None = None  # what the batch shows: padding, documents
    bias: Tensor | BiasFunction | None = None  # of self-attention; batch head query key
    source: Tensor | None = None  # what cross-attention reads: (batch, key, d_model)
    source_visible: Mask | None = None
    _turns: dict[Rotary, Spread] = field(default_factory=dict)
    _blocks: dict[tuple[Mask, int], Tensor] = field(default_factory=dict)

    @property
    def keys(self) -> int:
        """Keys of self-attention: the cached ones and this pass's."""
        return self.past + self.queries

    def positions(self) -> Tensor:
        """Position ids, ``position`` or ``batch position``."""
        if self.position_ids is None:
            self.position_ids = torch.arange(self.past, self.keys, device=self.device)
        return self.position_ids

    def turns(self, rotary: Rotary) -> Spread:
        """The rotation of the positions, once for all layers that turn alike."""
        found = self._turns.get(rotary)
        if found is None:
            ids = self.positions()
            length = None if rotary.scaling is None else int(ids.max()) + 1
            inv_freq, factor = frequencies(
                rotary.width, base=rotary.base, scaling=rotary.scaling, length=length
            )
            dtype = torch.float64 if self.dtype == torch.float64 else torch.float32
            # float32 angles, as the models were trained; float64 models keep float64 angles.
            turns = rotation(ids, inv_freq.to(dtype), factor=factor, dtype=dtype)
            found = spread(turns, layout=rotary.layout)
            self._turns[rotary] = found
        return found

    def block(self, mask: Mask, keys: int) -> Tensor:
        """The boolean block ``batch 1 query key`` of a mask, once for all layers that share it."""
        found = self._blocks.get((mask, keys))
        if found is None:
            offset = keys - self.queries
            rows = [mask.dense(b, self.queries, keys, offset) for b in range(mask.batches() or 1)]
            found = torch.stack(rows)[:, None].to(self.device)
            self._blocks[mask, keys] = found
        return found


def as_mask(mask: Mask | Tensor | None, batch: int, queries: int, keys: int) -> Mask | None:
    """A mask as a rule; the last query stands at the last key.

    Rules pass. A boolean ``batch key`` says which keys are no padding; a boolean
    ``batch query key`` (or one for all sequences: ``1 query key``) says which pairs are visible.
    Numbers are refused: a 0/1 float mask, added to logits, would hide nothing.

    Example:
        >>> as_mask(torch.tensor([[False, True]]), batch=1, queries=2, keys=2)
        KeyPadding(keep=tensor([[False,  True]]))
    """
    if mask is None:
        return None
    if isinstance(mask, Mask):
        _check_rule(mask, batch, keys)
        return mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ShapeError(
            f"a mask of type {kind}",
            allowed="a mask object, or a boolean tensor in which True may be seen",
            to_do="for a 0/1 mask: mask.bool()",
        )
    if mask.dim() == 2 and mask.shape == (batch, keys):
        return KeyPadding(mask)
    if mask.dim() == 3 and mask.shape[0] in (1, batch) and mask.shape[1:] == (queries, keys):
        return Dense(mask, offset=keys - queries)
    raise ShapeError(
        f"a mask of shape {tuple(mask.shape)} for {batch} sequences, {queries} queries and"
        f" {keys} keys",
        allowed=f"({batch}, {keys}) or ({batch}, {queries}, {keys})",
        to_do="give one True or False for each key, cached ones included",
    )


def _check_rule(mask: Mask, batch: int, keys: int) -> None:
    """Refuse a rule for another batch, and a table that ends before the last key."""
    sequences = mask.batches()
    if sequences is not None and sequences != batch:
        raise ShapeError(
            f"a mask for {sequences} sequences and a batch of {batch}",
            allowed="one row of the mask for each sequence",
            to_do="make the mask from the batch that is given",
        )
    table = getattr(mask, "keep", getattr(mask, "ids", None))
    if isinstance(table, Tensor) and table.shape[-1] < keys:
        raise ShapeError(
            f"a mask of {table.shape[-1]} keys for {keys}",
            allowed=f"{keys} keys or more",
            to_do="give one entry for each key, cached ones included",
        )
