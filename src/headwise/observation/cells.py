"""Cells of a square map per head, of which only the lower triangle is held while that is enough.

Under a causal mask nothing is ever added above the diagonal: half of the memory would hold zeros,
and the maps are most of what a scan weighs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headwise.observation.lasting import lasting

__all__ = ["Cells"]


class Cells:
    """Sums in ``head row column``, float64.

    Example:
        >>> c = Cells(1)
        >>> c.resize(2)
        >>> c.add(torch.ones(1, 1, 2), 1, 0, slice(None))
        >>> c.dense().tolist(), c.square
        ([[[0.0, 0.0], [1.0, 1.0]]], False)
    """

    def __init__(self, heads: int) -> None:
        self.heads, self.side, self.square = heads, 0, False
        self._data = torch.zeros(heads, 0, dtype=torch.float64)

    def dense(self) -> Tensor:
        """All cells: ``head row column``."""
        if self.square:
            return self._data.view(self.heads, self.side, self.side)
        out = torch.zeros(self.heads, self.side, self.side, dtype=torch.float64)
        row, column = torch.tril_indices(self.side, self.side)
        out[:, row, column] = self._data
        return out

    def replace(self, cells: Tensor) -> None:
        """Hold these cells instead."""
        self.square = self.square or bool(cells.triu(1).any())
        self.side = cells.shape[-1]
        count = self.side**2 if self.square else self.side * (self.side + 1) // 2
        self._data = lasting(self.heads, count, dtype=torch.float64)
        if self.square:
            self._data.copy_(cells.flatten(1))
        else:
            row, column = torch.tril_indices(self.side, self.side)
            self._data.copy_(cells[:, row, column])

    def resize(self, side: int) -> None:
        """Make room for more rows and columns."""
        if side > self.side:
            more = side - self.side
            self.replace(torch.nn.functional.pad(self.dense(), (0, more, 0, more)))

    def add(self, sums: Tensor, row: int, column: int, heads: Any) -> None:
        """Add ``head rows columns`` sums whose first cell is (row, column)."""
        i = torch.arange(row, row + sums.shape[-2])[:, None]
        j = torch.arange(column, column + sums.shape[-1])[None, :]
        if not self.square and bool(sums[:, (j > i).expand(sums.shape[1:])].any()):
            cells, self.square = self.dense(), True
            self.replace(cells)
        if self.square:
            place, kept = (i * self.side + j).flatten(), sums.flatten(1)
        else:
            below = j <= i
            place, kept = (i * (i + 1) // 2 + j)[below], sums[:, below.expand(sums.shape[1:])]
        if isinstance(heads, slice):
            self._data[heads].index_add_(1, place, kept.to(self._data.dtype))
        else:
            self._data[heads[:, None], place] += kept
