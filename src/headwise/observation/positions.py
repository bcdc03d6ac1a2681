"""Sums by position, in bins that double in width when positions go beyond the last bin.

The width is always the smallest power of two at which the positions seen so far fit into 128 bins.
Doubling adds neighbouring bins, which loses nothing, so sums do not depend on the order in which
documents of different lengths arrive, nor on where a run was cut in two.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from headwise.observation.cells import Cells
from headwise.observation.lasting import lasting

__all__ = ["MOST_BINS", "PooledMap", "Profile"]

MOST_BINS: Final = 128


def _width(length: int) -> int:
    """The smallest power of two so that ``length`` positions need at most MOST_BINS bins."""
    return 1 << (max(1, -(-length // MOST_BINS)) - 1).bit_length()


def _halve(x: Tensor, axis: int, factor: int) -> Tensor:
    """Add groups of ``factor`` neighbours along an axis."""
    missing = -x.shape[axis] % factor
    if missing:
        shape = list(x.shape)
        shape[axis] = missing
        x = torch.cat((x, x.new_zeros(shape)), axis)
    return x.unflatten(axis, (-1, factor)).sum(axis + 1 if axis >= 0 else axis)


class Profile:
    """Sums of statistics over the rows of each position bin."""

    def __init__(self, statistics: int, heads: int) -> None:
        self.width = 1
        self.bins = 0
        self.sums = lasting(statistics, heads, MOST_BINS, dtype=torch.float64)
        self.counts = lasting(statistics, heads, MOST_BINS, dtype=torch.int64)
        self.rows = torch.zeros(MOST_BINS, dtype=torch.int64)

    def fit(self, length: int) -> None:
        """Make room for positions 0 .. length - 1."""
        width = _width(length)
        if width > self.width:
            factor = width // self.width
            for name in ("sums", "counts", "rows"):
                whole = getattr(self, name)
                small = _halve(whole, -1, factor)
                whole.zero_()
                whole[..., : small.shape[-1]] = small
            self.bins, self.width = -(-self.bins // factor), width
        self.bins = max(self.bins, -(-length // self.width))

    def add(self, x: Tensor, missing: Tensor | None, position: Tensor, heads: Any) -> None:
        """Add ``statistic batch head row`` values at rising positions; 0 where ``missing``."""
        if not position.numel():
            return
        self.fit(int(position[-1]) + 1)
        first, last = int(position[0]) // self.width, int(position[-1]) // self.width
        whole, count = slice(first, last + 1), last - first + 1
        bin_of = position // self.width - first
        rows = torch.bincount(bin_of, minlength=count) * x.shape[1]
        counts = rows.expand(*x.shape[:1], x.shape[2], count)
        if missing is not None:
            i, _, h, r = missing.nonzero(as_tuple=True)
            cells = (i * x.shape[2] + h) * count + bin_of[r]
            counts = counts - torch.bincount(cells, minlength=counts.numel()).view(counts.shape)
        self.sums[:, heads, whole] += self._binned(x, position, bin_of).sum(1)
        self.counts[:, heads, whole] += counts
        self.rows[whole] += rows

    def totals(self) -> tuple[Tensor, Tensor]:
        """Sums and counts over all positions, ``statistic head``."""
        return self.sums.sum(-1), self.counts.sum(-1)

    def _binned(self, x: Tensor, position: Tensor, bin_of: Tensor) -> Tensor:
        """Sums over the bins that the positions touch: ``... row -> ... bin``, in float64."""
        first, last = int(position[0]), int(position[-1])
        if last - first + 1 == position.numel():
            before, after = first % self.width, -(last + 1) % self.width
            padded = torch.zeros(
                *x.shape[:-1], before + position.numel() + after, dtype=torch.float64
            )
            padded[..., before : before + position.numel()] = x
            return padded.unflatten(-1, (-1, self.width)).sum(-1)
        out = torch.zeros(*x.shape[:-1], int(bin_of[-1]) + 1, dtype=torch.float64)
        return out.index_add_(-1, bin_of, x.double())

    def merge(self, other: Profile) -> None:
        """Add the sums of another profile."""
        length = max(self.bins * self.width, other.bins * other.width)
        self.fit(length)
        factor = self.width // other.width
        for name in ("sums", "counts", "rows"):
            small = _halve(getattr(other, name), -1, factor) if factor > 1 else getattr(other, name)
            getattr(self, name)[..., : small.shape[-1]] += small

    def finish(self) -> tuple[Tensor, Tensor, int]:
        """Means ``statistic head bin``, rows per bin, and the width of a bin."""
        used = slice(0, self.bins)
        return self.sums[..., used] / self.counts[..., used], self.rows[used].clone(), self.width


class PooledMap:
    """The attention matrix summed over square blocks of positions, and the rows in each."""

    def __init__(self, heads: int) -> None:
        self.width = 1
        self.blocks = 0
        self.cells = Cells(heads)
        self.rows = torch.zeros(0, dtype=torch.int64)

    def fit(self, length: int) -> None:
        """Make room for positions 0 .. length - 1, as queries and as keys."""
        width = _width(length)
        if width > self.width:
            factor = width // self.width
            self.cells.replace(_halve(_halve(self.cells.dense(), -1, factor), -2, factor))
            self.rows = _halve(self.rows, -1, factor)
            self.width, self.blocks = width, self.rows.shape[0]
        blocks = max(self.blocks, -(-length // self.width))
        if blocks > self.blocks:
            more = blocks - self.blocks
            self.cells.resize(blocks)
            self.rows = torch.nn.functional.pad(self.rows, (0, more))
            self.blocks = blocks

    def add(
        self, sums: Tensor, first: tuple[int, int], position: Tensor, seen: Tensor, heads: Any
    ) -> None:
        """Add ``head block block`` sums of this width; ``first``: where their blocks begin.

        ``seen``: at each of the query positions, how many rows see anything.
        """
        self.cells.add(sums, *first, heads)
        self.rows.index_add_(0, position // self.width, seen)

    def merge(self, other: PooledMap) -> None:
        """Add another map."""
        self.fit(max(self.blocks * self.width, other.blocks * other.width))
        factor = self.width // other.width
        sums, rows = other.cells.dense(), other.rows
        if factor > 1:
            sums, rows = _halve(_halve(sums, -1, factor), -2, factor), _halve(rows, -1, factor)
        self.cells.add(sums, 0, 0, slice(None))
        self.rows[: rows.shape[0]] += rows

    def finish(self) -> tuple[Tensor, Tensor, int]:
        """Mean mass per row ``head block block``, rows per block row, and the width."""
        return self.cells.dense() / self.rows[None, :, None], self.rows.clone(), self.width
