"""Masks that are rules about positions: causal, windows, chunks, prefixes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask, Segment, clip
from headwise.errors import OptionError

__all__ = ["Band", "Causal", "Chunked", "Everything", "Prefix", "Window"]


@dataclass(frozen=True)
class Everything(Mask):
    """Every query sees every key (an encoder, or cross-attention)."""

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return torch.ones_like(query + key, dtype=torch.bool)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        return clip([Segment(0, keys, True)], keys)

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
        return clip([Segment(0, a, True), Segment(max(a, 0), b, False)], keys)

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
            raise OptionError(
                f"Band({self.before}, {self.after})", allowed="0 or more on each side"
            )

    def visible(self, batch: int, query: Tensor, key: Tensor) -> Tensor:
        return (key >= query - self.before) & (key <= query + self.after)

    def segments(self, batch: int, first: int, last: int, keys: int) -> list[Segment]:
        # All see [last - before, first + after]; the flanks are seen by some.
        lo, hi = first - self.before, last + self.after + 1
        all_lo, all_hi = last - self.before, first + self.after + 1
        if all_lo >= all_hi:
            return clip([Segment(lo, hi, False)], keys)
        return clip(
            [Segment(lo, all_lo, False), Segment(all_lo, all_hi, True), Segment(all_hi, hi, False)],
            keys,
        )

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        return (query - self.before).clamp(0, keys), (query + (self.after + 1)).clamp(0, keys)

    def relative(self) -> bool:
        return True

    def looks_ahead(self) -> bool:
        return self.after > 0


def Window(width: int) -> Band:
    """A sliding window of ``width`` keys, its own included: position - width < j <= position.

    Mistral 7B, Jiang et al. 2023 (arXiv:2310.06825), section 2. (FlashAttention's
    ``window_size=(L, 0)`` sees L + 1 keys.)
    """
    if width < 1:
        raise OptionError(
            f"a window of {width} keys", allowed="1 or more, the query's own included"
        )
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
        return clip([Segment(begin, end, a == b)], keys)

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
        return clip([Segment(0, self.length, True)], keys)

    def interval(self, batch: int, query: Tensor, keys: int) -> tuple[Tensor, Tensor] | None:
        return torch.zeros_like(query), torch.full_like(query, min(self.length, keys))
