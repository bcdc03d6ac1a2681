"""A tensor that grows along its last axis, with spare room so that growing stays cheap."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.observation.lasting import lasting

__all__ = ["Growing"]


class Growing:
    """Append to the last axis; ``view()`` is what is there so far.

    Example:
        >>> g = Growing((), torch.long, fill=-1)
        >>> g.extend(2)
        >>> g.view().tolist()
        [-1, -1]
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float = 0) -> None:
        self.length = 0
        self._fill = fill
        self._data = torch.full((*shape, 0), fill, dtype=dtype)

    def extend(self, count: int) -> None:
        """Make room for ``count`` more entries, holding the fill value."""
        self.resize(self.length + count)

    def resize(self, length: int) -> None:
        """Set the length; entries that are cut off are forgotten."""
        room = self._data.shape[-1]
        if length > room:
            shape = (*self._data.shape[:-1], max(length, room + room // 2))
            data = lasting(*shape, dtype=self._data.dtype, fill=self._fill)
            data[..., :room] = self._data
            self._data = data
        if length < self.length:
            self._data[..., length : self.length] = self._fill
        self.length = length

    def append(self, values: Tensor) -> None:
        """Add values at the end."""
        start = self.length
        self.extend(values.shape[-1])
        self._data[..., start : self.length] = values.to(self._data.device)

    def view(self) -> Tensor:
        """The entries so far; writing into it writes here."""
        return self._data[..., : self.length]
