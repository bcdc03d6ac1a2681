"""What one call of ``measure`` computes, and what the rows of a head add up to.

Both forms of the strip pass, ``strips.py`` and ``compiled.py``, read a ``Problem`` and fill
``Sums``. Logits are in base 2 in both: q is scaled by log2 e once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from threading import Lock
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headwise.attention.masks import Mask, Segment
from headwise.attention.state import LOG2E

__all__ = ["GAP", "LOG2E", "RAW", "Bias", "Form", "Problem", "Sums", "places", "poison"]


Bias = Callable[[int, slice, Tensor, range], Tensor]
"""``bias(batch, heads, query, key)``: added to the logits of these heads, query rows and keys."""

# What a strip leaves behind for each row, over the keys that are not sinks; x = logit - peak, and
# every weight is relative to 2^peak.
RAW: Final = (
    "peak",
    "total",
    "weighted",
    "square",
    "distance",
    "least",
    "sum_x",
    "sum_xx",
    "count",
    "largest",
    "self",
    "previous",
)

_HEADS_AT_WORK: Final = 2
GAP: Final = 128  # hidden keys between two runs that are still cheaper to compute than to skip


class Form(Enum):
    """How the strip pass is carried out; the mathematics is the same."""

    TENSORS = "tensor operations: any device, any dtype"
    LOOPS = "compiled row loops between torch's matrix products: CPU, float32"
    WHOLE = "whole strips compiled, products included: masks of one run of keys per row, no bias"


@dataclass(frozen=True)
class Problem:
    """What is measured: fixed for one call of ``measure``."""

    q: Tensor
    k: Tensor
    v: Tensor | None
    mask: Mask
    scale: float
    softcap: float | None
    bias: Bias | None
    sinks: Tensor | None
    offset: int
    rows: Tensor  # indices of the measured query rows, ascending, on the device
    row_list: list[int]
    every_row: bool
    keep: Tensor | None  # (batch, query): rows that feed the reductions
    sink_keys: int
    pool: int | None
    relative: bool
    dtype: torch.dtype
    tile: int
    form: Form
    pad: int  # zero columns beside a run, so that skewed views stay inside the buffer
    clean_v: bool  # v has no NaN and no infinity
    bands: int  # distance bands, 0 without a common axis
    bounds: dict[int, Bounds] = field(default_factory=dict)
    runs_by_strip: dict[tuple[int, int, int], list[tuple[int, int]]] = field(default_factory=dict)
    keys_by_head: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    def transposed_keys(self, batch: int, kv_head: int) -> Tensor:
        """k of one head as ``d_head key``, contiguous: the layout that makes q kᵀ fastest."""
        name = (batch, kv_head)
        with self.lock:
            if name not in self.keys_by_head:
                # The parts of a head come one after the other: few heads are at work at a time.
                while len(self.keys_by_head) >= _HEADS_AT_WORK:
                    self.keys_by_head.pop(next(iter(self.keys_by_head)))
                self.keys_by_head[name] = self.k[name].to(self.dtype).t().contiguous()
            return self.keys_by_head[name]

    def segments(self, batch: int, i0: int, i1: int) -> list[Segment]:
        """The runs of visible keys, sinks left out, for the measured rows i0..i1-1."""
        first, last = self.row_list[i0] + self.offset, self.row_list[i1 - 1] + self.offset
        runs = self.mask.segments(batch, first, last, self.keys)
        s = self.sink_keys
        return [Segment(max(a, s), b, full) for a, b, full in runs if b > s]

    def runs(self, batch: int, i0: int, i1: int) -> list[tuple[int, int]]:
        """Column ranges that a strip keeps; the sinks are always part of one of them."""
        name = (batch if self.mask.batches() is not None else 0, i0, i1)
        if name not in self.runs_by_strip:
            self.runs_by_strip[name] = self._find_runs(batch, i0, i1)
        return self.runs_by_strip[name]

    def _find_runs(self, batch: int, i0: int, i1: int) -> list[tuple[int, int]]:
        out: list[tuple[int, int]] = [(0, self.sink_keys)] if self.sink_keys else []
        for start, stop, _ in self.segments(batch, i0, i1):
            if out and start - out[-1][1] < GAP:
                out[-1] = (out[-1][0], stop)
            else:
                out.append((start, stop))
        return out


@dataclass(frozen=True)
class Bounds:
    """What compiled loops need of the measured rows, as arrays of one number per row."""

    row: np.ndarray
    position: np.ndarray
    start: np.ndarray  # the keys a row sees: [start, stop) …
    stop: np.ndarray
    holes: bool  # … and among these, not those whose logit is -inf
    block: np.ndarray  # of the pooled map
    feeds: np.ndarray  # 1 for rows that feed the reductions, else 0

    def widest(self, strips: list[tuple[int, int]], sinks: int) -> int:
        """Columns that the widest strip keeps, the sinks included."""
        first = [i0 for i0, _ in strips]
        seen = self.start < self.stop
        lo = np.minimum.reduceat(np.where(seen, self.start, self.stop.max(initial=0)), first)
        hi = np.maximum.reduceat(np.where(seen, self.stop, 0), first)
        return int(np.max(hi - np.where(lo - sinks < GAP, 0, lo), initial=0)) + sinks

    @staticmethod
    def of(p: Problem, batch: int) -> Bounds:
        """The bounds of one sequence, found once."""
        name = batch if p.mask.batches() is not None or p.keep is not None else 0
        if name not in p.bounds:
            position = p.rows + p.offset
            found = p.mask.interval(batch, position, p.keys)
            start, stop = found or (
                torch.zeros_like(position),
                torch.full_like(position, p.keys),
            )
            pool = p.pool or p.keys + abs(p.offset) + p.q.shape[2]
            block = position // pool
            keep = torch.ones_like(position) if p.keep is None else p.keep[batch, p.rows]
            p.bounds[name] = Bounds(
                row=p.rows.numpy(),
                position=position.numpy(),
                start=start.numpy(),
                stop=stop.numpy(),
                holes=found is None or p.bias is not None,
                block=(block - block[0]).numpy(),
                feeds=keep.to(p.dtype).numpy(),
            )
        return p.bounds[name]


@dataclass
class Sums:
    """What the rows of one (sequence, kv head) add up to; g query heads, R measured rows."""

    raw: Tensor  # (len(RAW), g, R)
    sink_logits: Tensor  # (g, R, s) base 2, -inf where hidden
    log2_total: Tensor  # (g, R): log2 of the denominator, learned sink included
    top_key: Tensor  # (g, R)
    bands: Tensor | None  # (g, R, nb)
    output: Tensor | None  # (g, R, d_value)
    received: Tensor  # (g, n)
    pooled: Tensor | None  # (g, Gq, Gk)

    def part(self, batch: int, kv_head: int) -> Sums:
        """What one part of the strips of a head writes to: its own column sums, the same rows."""

        def of(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[batch, kv_head]

        return Sums(
            raw=self.raw[batch, kv_head],
            sink_logits=self.sink_logits[batch, kv_head],
            log2_total=self.log2_total[batch, kv_head],
            top_key=self.top_key[batch, kv_head],
            bands=of(self.bands),
            output=of(self.output),
            received=torch.zeros_like(self.received[batch, kv_head]),
            pooled=None if self.pooled is None else torch.zeros_like(self.pooled[batch, kv_head]),
        )

    def arrays(self) -> tuple[np.ndarray, ...]:
        """What is kept per row, as NumPy arrays on the same memory; empty where it is None."""
        nothing = self.received.new_empty(0, 0, 0)
        bands = nothing if self.bands is None else self.bands
        output = nothing if self.output is None else self.output
        rows = (self.raw, self.sink_logits, self.log2_total, self.top_key, bands, output)
        return tuple(x.numpy() for x in rows)

    def column_arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The column sums and the pooled map, likewise."""
        nothing = self.received.new_empty(0, 0, 0)
        return self.received.numpy(), (nothing if self.pooled is None else self.pooled).numpy()


def places(runs: list[tuple[int, int]], pad: int) -> list[int]:
    """The first column of each run in ``kept``: runs lie side by side, padded with zeros."""
    out, at = [], pad
    for start, stop in runs:
        out.append(at)
        at += stop - start + pad
    return out


def poison(o: Tensor, e: Tensor, v: Tensor) -> Tensor:
    """Put NaN where a weight that is not zero meets a value that is not finite."""
    bad = (~torch.isfinite(v)).to(e.dtype)
    return o.masked_fill_((e != 0).to(e.dtype) @ bad > 0, math.nan)
