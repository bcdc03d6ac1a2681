"""Masks that read a table: padding, packed documents, a matrix, any rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask, Segment, clip
from headwise.errors import ShapeError

__all__ = ["Dense", "Documents", "KeyPadding", "Predicate"]


@dataclass(frozen=True, eq=False)
class KeyPadding(Mask):
    """Keys that are real: ``keep`` is boolean, ``batch key``, True = may be attended to."""

    keep: Tensor
    _runs: list[list[Segment]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _require_bool("the key padding mask", self.keep, ndim=2)
        object.__setattr__(self, "_runs", [_runs_of(row) for row in self.keep])

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        keep = self.keep[batch].to(key.device)
        inside = (key >= 0) & (key < keep.numel())
        seen = keep[key.clamp(0, keep.numel() - 1)] & inside
        return seen & torch.ones_like(query, dtype=torch.bool)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        return clip(self._runs[batch], keys)

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        if len(self._runs[batch]) > 1:
            return None
        start, stop, _ = (*self._runs[batch], Segment(0, 0, True))[0]
        return torch.full_like(query, start), torch.full_like(query, min(stop, keys))

    def batches(self) -> int | None:
        return int(self.keep.shape[0])


@dataclass(frozen=True, eq=False)
class Documents(Mask):
    """Packed rows: a query sees the keys of its own document.

    ``ids`` (integers, ``batch key``) names the document of each position; equal names need not be
    neighbours. Combine with ``Causal()`` for a packed language-model batch.
    """

    ids: Tensor
    _runs: list[list[tuple[int, int, int]]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.ids.dim() != 2 or self.ids.is_floating_point() or self.ids.is_complex():
            raise ShapeError(
                f"document ids of shape {tuple(self.ids.shape)} and dtype {self.ids.dtype}",
                allowed="integers of shape (batch, key)",
            )
        object.__setattr__(self, "_runs", [_equal_runs(row) for row in self.ids])

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        ids = self.ids[batch].to(key.device)
        n = ids.numel()
        inside = (query >= 0) & (query < n) & (key >= 0) & (key < n)
        return (ids[query.clamp(0, n - 1)] == ids[key.clamp(0, n - 1)]) & inside

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        runs = self._runs[batch]
        asked = {name for start, stop, name in runs if stop > first and start <= last}
        inside = first >= 0 and last < int(self.ids.shape[1])
        return clip(
            [Segment(a, b, inside and len(asked) == 1) for a, b, name in runs if name in asked],
            keys,
        )

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        runs = self._runs[batch]
        if len({name for _, _, name in runs}) < len(runs):
            return None  # a document in several pieces
        start, stop = (torch.tensor([r[x] for r in runs], device=query.device) for x in (0, 1))
        inside = (query >= 0) & (query < stop[-1])
        run = torch.bucketize(query, stop, right=True).clamp(0, len(runs) - 1)
        return start[run] * inside, (stop[run] * inside).clamp(max=keys)

    def batches(self) -> int | None:
        return int(self.ids.shape[0])


@dataclass(frozen=True, eq=False)
class Predicate(Mask):
    """Any rule: ``rule(batch, query, key) -> bool`` on broadcasting index tensors.

    Nothing is known about whole tiles, so every tile is evaluated; ``batch`` is an integer.
    """

    rule: Callable[[int, Tensor, Tensor], Tensor]

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return self.rule(batch, query, key)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        return clip([Segment(0, keys, False)], keys)


@dataclass(frozen=True, eq=False)
class Dense(Mask):
    """A boolean matrix that somebody already has: ``batch query key``, True = may attend.

    ``offset`` is the key position of its first row.
    """

    keep: Tensor
    offset: int = 0

    def __post_init__(self) -> None:
        _require_bool("the attention mask", self.keep, ndim=3)

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        keep = self.keep[batch if self.keep.shape[0] > 1 else 0]
        return keep.to(key.device)[query - self.offset, key]

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        return clip([Segment(0, keys, False)], keys)

    def batches(self) -> int | None:
        return int(self.keep.shape[0]) if self.keep.shape[0] > 1 else None


def _equal_runs(row: Tensor) -> list[tuple[int, int, int]]:
    """Maximal runs of equal values: (start, stop, value)."""
    if not row.numel():
        return []
    values, counts = torch.unique_consecutive(row.cpu(), return_counts=True)
    stops = counts.cumsum(0).tolist()
    starts = [0, *stops[:-1]]
    return list(zip(starts, stops, values.tolist(), strict=True))


def _runs_of(row: Tensor) -> list[Segment]:
    """The runs of True."""
    return [Segment(a, b, True) for a, b, value in _equal_runs(row) if value]


def _require_bool(what: str, keep: Tensor, ndim: int) -> None:
    if keep.dtype != torch.bool or keep.dim() != ndim:
        axes = {2: "(batch, key)", 3: "(batch, query, key)"}[ndim]
        raise ShapeError(
            f"{what} has dtype {keep.dtype} and shape {tuple(keep.shape)}",
            allowed=f"torch.bool of shape {axes}, True = may attend",
            to_do="a 0/1 mask becomes one with mask.bool()",
        )
