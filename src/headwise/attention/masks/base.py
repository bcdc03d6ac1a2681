"""What a mask is, and how two of them combine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import ShapeError

__all__ = ["EMPTY", "FULL", "Both", "Either", "Mask", "Segment", "Tile", "clip"]

EMPTY: Final = "empty"
FULL: Final = "full"
Tile = Literal["empty", "full"] | Tensor

# Beyond this many runs in one answer, bookkeeping costs more than a boolean block does.
_MOST_SEGMENTS = 16


class Segment(NamedTuple):
    """A run of keys ``[start, stop)``; ``full`` when every asked query sees all of it."""

    start: int
    stop: int
    full: bool


class Mask(ABC):
    """Who may attend to whom. Combine with ``&`` and ``|``."""

    @abstractmethod
    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        """The predicate: may the query at position ``query`` attend to ``key``?

        ``query`` and ``key`` are integer tensors of positions that broadcast; so is the answer.
        """

    @abstractmethod
    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        """Runs of keys in ``[0, keys)`` that queries at positions first..last may see, in order."""

    def tile(
        self, batch: int, query: range, key: range, device: torch.device | None = None
    ) -> Tile:
        """EMPTY, FULL, or the boolean block of the query positions by keys.

        Example:
            >>> from headwise.attention.masks import Causal
            >>> Causal().tile(0, range(4, 8), range(0, 4))
            'full'
            >>> Causal().tile(0, range(0, 2), range(0, 2)).tolist()
            [[True, False], [True, True]]
        """
        if not len(query) or not len(key):
            return EMPTY
        runs = [
            s
            for s in self.segments(batch, query[0], query[-1], key[-1] + 1)
            if s.stop > key[0] and s.start <= key[-1]
        ]
        if not runs:
            return EMPTY
        if len(runs) == 1 and runs[0].full and runs[0].start <= key[0] and runs[0].stop > key[-1]:
            return FULL
        rows = torch.arange(query.start, query.stop, device=device)[:, None]
        columns = torch.arange(key.start, key.stop, device=device)[None, :]
        block = self.visible(batch, rows, columns).expand(len(query), len(key))
        if block.all():
            return FULL
        return block if block.any() else EMPTY

    def dense(self, batch: int, queries: int, keys: int, offset: int | None = None) -> Tensor:
        """The whole boolean matrix ``query key``: for tests and small sizes."""
        shift = keys - queries if offset is None else offset
        rows = torch.arange(shift, shift + queries)[:, None]
        return self.visible(batch, rows, torch.arange(keys)[None, :]).expand(queries, keys)

    def batches(self) -> int | None:
        """How many sequences the mask is for; None when it is the same for all."""
        return None

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        """Bounds (start, stop) of the keys each query position sees, when they are one run.

        None when they need not be one run, or when that is not known without looking.
        """
        return None

    def relative(self) -> bool:
        """Whether ``visible`` depends on ``query - key`` alone, so that blocks can be reused."""
        return False

    def looks_ahead(self) -> bool:
        """Whether a query may see a key after its own position (False only when that is sure)."""
        return True

    def __and__(self, other: Mask) -> Mask:
        return Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return Either(self, other)


@dataclass(frozen=True)
class Both(Mask):
    """Visible under both masks."""

    left: Mask
    right: Mask

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return self.left.visible(batch, query, key) & self.right.visible(batch, query, key)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        a = self.left.segments(batch, first, last, keys)
        b = self.right.segments(batch, first, last, keys)
        out = []
        for s in a:
            for t in b:
                lo, hi = max(s.start, t.start), min(s.stop, t.stop)
                if lo < hi:
                    out.append(Segment(lo, hi, s.full and t.full))
        return clip(out, keys)

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        a = self.left.interval(batch, query, keys)
        b = self.right.interval(batch, query, keys)
        if a is None or b is None:
            return None
        start, stop = torch.maximum(a[0], b[0]), torch.minimum(a[1], b[1])
        return start, torch.maximum(start, stop)

    def batches(self) -> int | None:
        return _same_batches(self.left, self.right)

    def relative(self) -> bool:
        return self.left.relative() and self.right.relative()

    def looks_ahead(self) -> bool:
        return self.left.looks_ahead() and self.right.looks_ahead()


@dataclass(frozen=True)
class Either(Mask):
    """Visible under at least one mask."""

    left: Mask
    right: Mask

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return self.left.visible(batch, query, key) | self.right.visible(batch, query, key)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        runs = self.left.segments(batch, first, last, keys)
        runs = runs + self.right.segments(batch, first, last, keys)
        cuts = sorted({edge for s in runs for edge in (s.start, s.stop)})
        out = []
        for lo, hi in pairwise(cuts):
            over = [s for s in runs if s.start <= lo and s.stop >= hi]
            if over:
                out.append(Segment(lo, hi, any(s.full for s in over)))
        return clip(out, keys)

    def batches(self) -> int | None:
        return _same_batches(self.left, self.right)

    def relative(self) -> bool:
        return self.left.relative() and self.right.relative()

    def looks_ahead(self) -> bool:
        return self.left.looks_ahead() or self.right.looks_ahead()


def clip(runs: Sequence[Segment], keys: int) -> list[Segment]:
    """Sort, cut to [0, keys), drop empty runs, join neighbours that can be joined."""
    out: list[Segment] = []
    for start, stop, full in sorted(runs):
        start, stop = max(start, 0), min(stop, keys)
        if start >= stop:
            continue
        if out and out[-1].stop == start and out[-1].full == full:
            out[-1] = Segment(out[-1].start, stop, full)
        else:
            out.append(Segment(start, stop, full))
    if len(out) > _MOST_SEGMENTS:
        return [Segment(out[0].start, out[-1].stop, False)]
    return out


def _same_batches(left: Mask, right: Mask) -> int | None:
    a, b = left.batches(), right.batches()
    if a is not None and b is not None and a != b:
        raise ShapeError(
            f"masks for {a} and for {b} sequences were combined", allowed="one batch size"
        )
    return a if a is not None else b
