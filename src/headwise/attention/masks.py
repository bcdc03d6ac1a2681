"""Implicit masks: who may attend to whom, without ever holding an n×n array.

A mask is a predicate over (sequence, query position, key position) together with what can be said
about it for whole runs of keys. Positions are indices on the key axis: query row i of m stands at
position ``i + offset``, and unless told otherwise the last query stands at the last key
(``offset = n - m``, "bottom-right"), which is what a key-value cache means.

Conventions, in one place:

* ``True`` means *may attend*.
* A window of W is W keys, the query's own included.
* A row that may attend to nothing is legal; the attention functions define what it yields.

Two questions are enough for every algorithm in this package:

``visible(batch, query, key)``
    the definition: index tensors in, a boolean tensor out (broadcast);
``segments(batch, first, last, keys)``
    for the query positions first..last, the runs of keys that any of them may see, each marked
    *full* when all of them see all of it. Keys outside every run are hidden from all.

``tile`` puts the two together: EMPTY, FULL, or the boolean block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError

__all__ = [
    "EMPTY",
    "FULL",
    "Band",
    "Causal",
    "Chunked",
    "Dense",
    "Documents",
    "Everything",
    "KeyPadding",
    "Mask",
    "Predicate",
    "Prefix",
    "Segment",
    "Window",
    "describe",
]

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

    def tile(self, batch: int, query: range, key: range, device: torch.device | None = None) -> Tile:
        """EMPTY, FULL, or the boolean block of the query positions by keys.

        Example:
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
        return _Both(self, other)

    def __or__(self, other: Mask) -> Mask:
        return _Either(self, other)


@dataclass(frozen=True)
class Everything(Mask):
    """Every query sees every key (an encoder, or cross-attention)."""

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones_like(query + key, dtype=torch.bool)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        return _clip([Segment(0, keys, True)], keys)

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        return torch.zeros_like(query), torch.full_like(query, keys)

    def relative(self) -> bool:
        return True


@dataclass(frozen=True)
class Causal(Mask):
    """A query sees itself and what came before: key j is visible iff j <= position + shift.

    ``shift`` moves the diagonal (0: the query's own key is the last visible one).
    """

    shift: int = 0

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + self.shift

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        a, b = first + self.shift + 1, last + self.shift + 1
        return _clip([Segment(0, a, True), Segment(max(a, 0), b, False)], keys)

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        return torch.zeros_like(query), (query + (self.shift + 1)).clamp(0, keys)

    def relative(self) -> bool:
        return True

    def looks_ahead(self) -> bool:
        return self.shift > 0


@dataclass(frozen=True)
class Band(Mask):
    """Keys from ``before`` tokens back to ``after`` tokens ahead, the query's own in between."""

    before: int
    after: int = 0

    def __post_init__(self) -> None:
        if self.before < 0 or self.after < 0:
            raise OptionError(f"Band({self.before}, {self.after})", allowed="0 or more on each side")

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return (key >= query - self.before) & (key <= query + self.after)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        # All see [last - before, first + after]; the flanks are seen by some.
        lo, hi = first - self.before, last + self.after + 1
        all_lo, all_hi = last - self.before, first + self.after + 1
        if all_lo >= all_hi:
            return _clip([Segment(lo, hi, False)], keys)
        return _clip(
            [Segment(lo, all_lo, False), Segment(all_lo, all_hi, True), Segment(all_hi, hi, False)],
            keys,
        )

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        return (query - self.before).clamp(0, keys), (query + (self.after + 1)).clamp(0, keys)

    def relative(self) -> bool:
        return True

    def looks_ahead(self) -> bool:
        return self.after > 0


def Window(width: int) -> Band:  # noqa: N802 - reads as a mask, like its siblings
    """A sliding window of ``width`` keys, the query's own included: j in (position - width, position].

    Mistral 7B, Jiang et al. 2023 (arXiv:2310.06825), section 2. (FlashAttention's
    ``window_size=(L, 0)`` sees L + 1 keys.)
    """
    if width < 1:
        raise OptionError(f"a window of {width} keys", allowed="1 or more, the query's own included")
    return Band(before=width - 1)


@dataclass(frozen=True)
class Chunked(Mask):
    """Sequences cut into chunks of ``size``; a query sees the keys of its own chunk.

    ``start`` is the position where the first chunk begins.
    """

    size: int
    start: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise OptionError(f"chunks of {self.size} tokens", allowed="1 or more")

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        def chunk(x: Tensor) -> Tensor:
            return torch.div(x - self.start, self.size, rounding_mode="floor")

        return chunk(query) == chunk(key)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        a, b = (first - self.start) // self.size, (last - self.start) // self.size
        begin, end = self.start + a * self.size, self.start + (b + 1) * self.size
        return _clip([Segment(begin, end, a == b)], keys)

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        chunk = torch.div(query - self.start, self.size, rounding_mode="floor")
        begin = self.start + chunk * self.size
        return begin.clamp(0, keys), (begin + self.size).clamp(0, keys)


@dataclass(frozen=True)
class Prefix(Mask):
    """Everybody sees the first ``length`` keys. ``Causal() | Prefix(p)`` is a prefix-LM mask."""

    length: int

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return (key < self.length) & torch.ones_like(query, dtype=torch.bool)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        return _clip([Segment(0, self.length, True)], keys)

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        return torch.zeros_like(query), torch.full_like(query, min(self.length, keys))


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
        return _clip(self._runs[batch], keys)

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
        return _clip(
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
        return _clip([Segment(0, keys, False)], keys)


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
        return _clip([Segment(0, keys, False)], keys)

    def batches(self) -> int | None:
        return int(self.keep.shape[0]) if self.keep.shape[0] > 1 else None


@dataclass(frozen=True)
class _Both(Mask):
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
        return _clip(out, keys)

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
class _Either(Mask):
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
        for lo, hi in zip(cuts, cuts[1:], strict=False):
            over = [s for s in runs if s.start <= lo and s.stop >= hi]
            if over:
                out.append(Segment(lo, hi, any(s.full for s in over)))
        return _clip(out, keys)

    def batches(self) -> int | None:
        return _same_batches(self.left, self.right)

    def relative(self) -> bool:
        return self.left.relative() and self.right.relative()

    def looks_ahead(self) -> bool:
        return self.left.looks_ahead() or self.right.looks_ahead()


def describe(mask: Mask) -> str:
    """A mask in words, for reports.

    Example:
        >>> describe(Causal() & Window(128))
        'causal and window of 128 keys'
    """
    match mask:
        case Everything():
            return "full"
        case Causal(shift=0):
            return "causal"
        case Causal(shift=shift):
            return f"causal shifted by {shift}"
        case Band(before=before, after=0):
            return f"window of {before + 1} keys"
        case Band(before=before, after=after):
            return f"band of {before} keys before and {after} after"
        case Chunked(size=size):
            return f"chunks of {size}"
        case Prefix(length=length):
            return f"prefix of {length}"
        case KeyPadding():
            return "padding"
        case Documents():
            return "packed documents"
        case _Both(left=left, right=right):
            return f"{describe(left)} and {describe(right)}"
        case _Either(left=left, right=right):
            return f"{describe(left)} or {describe(right)}"
        case _:
            return "custom"


def _clip(runs: Sequence[Segment], keys: int) -> list[Segment]:
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


def _same_batches(left: Mask, right: Mask) -> int | None:
    a, b = left.batches(), right.batches()
    if a is not None and b is not None and a != b:
        raise ShapeError(
            f"masks for {a} and for {b} sequences were combined", allowed="one batch size"
        )
    return a if a is not None else b


def _require_bool(what: str, keep: Tensor, ndim: int) -> None:
    if keep.dtype != torch.bool or keep.dim() != ndim:
        axes = {2: "(batch, key)", 3: "(batch, query, key)"}[ndim]
        raise ShapeError(
            f"{what} has dtype {keep.dtype} and shape {tuple(keep.shape)}",
            allowed=f"torch.bool of shape {axes}, True = may attend",
            to_do="a 0/1 mask becomes one with mask.bool()",
        )
