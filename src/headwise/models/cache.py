"""The key-value cache: what decoding one token at a time does not compute again.

Memory for ``capacity`` positions is taken once and filled from the left, so that a step writes its
keys and values and reads a view. Keys stand in the cache as attention uses them: normed, turned,
and not repeated over the query heads that share them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.models.architecture import Architecture

__all__ = ["Cache", "Slot"]


@dataclass
class Slot:
    """Keys and values of one layer: ``batch kv_head capacity dim``; ``length`` are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0
    source: tuple[Tensor, Tensor] | None = None  # cross-attention's, computed once

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``batch kv_head position dim`` behind what is there; views of all of it."""
        start, stop = self.length, self.length + k.shape[2]
        if stop > self.keys.shape[2]:
            raise _full(stop - 1, self.keys.shape[2])
        room = self.keys
        if (*k.shape[:2], k.shape[3], k.dtype) != (*room.shape[:2], room.shape[3], room.dtype):
            raise ShapeError(
                f"keys {tuple(k.shape)} of {k.dtype} for a cache {tuple(room.shape)} of"
                f" {room.dtype}",
                allowed="one batch, number of heads, width and type",
                to_do="make the cache with Cache.empty(model.architecture, batch=…, dtype=…)",
            )
        if k.requires_grad:
            raise OptionError(
                "a key-value cache while gradients are recorded",
                allowed="a pass under torch.no_grad() or inference_mode()",
                to_do="leave the cache out where gradients are needed",
            )
        self.keys[:, :, start:stop] = k
        self.values[:, :, start:stop] = v
        self.length = stop
        return self.keys[:, :, :stop], self.values[:, :, :stop]


@dataclass
class Cache:
    """One ``Slot`` for each layer of a decoder.

    Example:
        >>> from headwise.models.presets import preset
        >>> cache = Cache.empty(preset("tiny"), batch=2, capacity=16)
        >>> len(cache.slots), cache.length, cache.capacity
        (2, 0, 16)
    """

    slots: list[Slot] = field(default_factory=list)

    @classmethod
    def empty(
        cls,
        architecture: Architecture,
        *,
        batch: int,
        capacity: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> Cache:
        """Memory for ``capacity`` positions of ``batch`` sequences in every layer."""
        if batch < 1 or capacity < 1:
            raise OptionError(
                f"a cache of {capacity} positions for {batch} sequences",
                allowed="1 or more of each",
                to_do="give the length of prompt and answer together",
            )
        stack = architecture.stack
        shape = (batch, stack.kv_heads, capacity, stack.d_head)

        def memory() -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls([Slot(memory(), memory()) for _ in range(stack.layers)])

    @property
    def length(self) -> int:
        """Positions that are filled."""
        return self.slots[0].length

    @property
    def capacity(self) -> int:
        """Positions that there is memory for."""
        return self.slots[0].keys.shape[2]

    def next_place(self) -> int:
        """The position that is written next.

        Raises:
            OptionError: the cache is full.
        """
        if self.length >= self.capacity:
            raise _full(self.length, self.capacity)
        return self.length

    def reorder(self, rows: Tensor) -> None:
        """Keep the given sequences, in the given order: ``row`` indices of the batch."""
        for slot in self.slots:
            slot.keys, slot.values = slot.keys[rows], slot.values[rows]
            if slot.source is not None:
                slot.source = (slot.source[0][rows], slot.source[1][rows])


def _full(position: int, capacity: int) -> OptionError:
    return OptionError(
        f"position {position} in a cache of {capacity} positions",
        allowed=f"0 to {capacity - 1}",
        to_do="make the cache as long as prompt and answer together",
    )
