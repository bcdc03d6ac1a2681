"""The strip pass on the CPU in float32: torch's matrix products, compiled loops between them.

The same mathematics, strip by strip, as ``strips.py``, which runs everywhere and in any dtype;
``statistics.py`` decides which of the two a call takes. Here the sinks are simply the first
columns of the first tile, and a row's keys come as a range where the mask can say so.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from headwise.attention import blas
from headwise.attention.part_kernel import absorb_part
from headwise.attention.plan import LOG2E, Bounds, Form, Problem, Sums, places, poison
from headwise.attention.strip_kernels import (
    STATE,
    absorb_tile,
    close_rows,
    open_rows,
    sum_columns,
)

__all__ = ["CompiledPass", "CompiledWorkspace"]

_CHUNK = 1024  # columns summed at a time, so that the partial sums stay in the nearest cache


class CompiledWorkspace:
    """Buffers that one worker reuses for every strip of ``rows`` rows (all heads of a group)."""

    def __init__(self, problem: Problem, rows: int, width: int) -> None:
        # A stride that is a power of two would make all rows compete for the same cache lines.
        stride = -(-width // 16) * 16 + 16
        d_value = 0 if problem.v is None else problem.v.shape[-1]
        self.queries = torch.empty(rows, problem.q.shape[-1])
        self.logits = torch.empty(rows * min(problem.tile, problem.keys))
        self.kept = torch.zeros(rows, stride)
        self.output = torch.empty(rows, d_value)
        self.kept_array, self.output_array = self.kept.numpy(), self.output.numpy()
        self.logits_array, self.queries_array = self.logits.numpy(), self.queries.numpy()
        self.state = np.empty((rows, STATE + 1), np.float32)
        self.top = np.empty(rows, np.int64)
        self.sink = np.empty((rows, problem.sink_keys), np.float32)
        self.bands = np.empty((rows, problem.bands), np.float32)
        self.scratch = np.empty(_CHUNK, np.float32)
        tiles = -(-problem.keys // problem.tile) + 2
        self.peaks = np.empty((tiles, rows), np.float32)
        self.factors = np.empty((tiles, rows), np.float32)
        self.table = np.empty((tiles, 3), np.int64)
        self.size = np.empty(7, np.int32)
        self.number = np.array([1, 0], np.float32)
        self.plain = np.frombuffer(b"N", np.uint8).copy()

    def arrays(self) -> tuple[np.ndarray, ...]:
        """What ``absorb_part`` works in."""
        return (
            self.logits_array,
            self.kept_array,
            self.output_array,
            self.state,
            self.top,
            self.sink,
            self.bands,
            self.peaks,
            self.factors,
            self.table,
            self.queries_array,
            self.scratch,
            self.size,
            self.number,
            self.plain,
        )


class CompiledPass:
    """The pass over the strips of one sequence and one key-value head."""

    def __init__(self, problem: Problem, batch: int, kv_head: int, work: CompiledWorkspace) -> None:
        p, g = problem, problem.group
        self.p, self.batch, self.work, self.g = p, batch, work, g
        self.heads = slice(kv_head * g, kv_head * g + g)
        self.q = p.q[batch, self.heads]
        self.k_t = p.transposed_keys(batch, kv_head)
        self.v = None if p.v is None else p.v[batch, kv_head].to(p.dtype)
        if self.v is not None and self.v.stride(1) != 1:
            self.v = self.v.contiguous()
        self.learned = np.empty(0, np.float32)
        if p.sinks is not None:
            self.learned = (p.sinks[self.heads].to(p.dtype) * LOG2E).numpy()
        self.sink_values = np.empty((0, 0), np.float32)
        if self.v is not None:
            self.sink_values = self.v[: p.sink_keys].contiguous().numpy()
        self.bounds = Bounds.of(p, batch)

    def absorb(self, sums: Sums, strips: list[tuple[int, int]]) -> None:
        """Measure these strips and add them to ``sums``."""
        if self.p.form is Form.WHOLE:
            self._absorb_part(sums, strips)
        else:
            for i0, i1 in strips:
                self._absorb_strip(sums, i0, i1)

    def _absorb_part(self, sums: Sums, strips: list[tuple[int, int]]) -> None:
        """All strips in one compiled call."""
        p, rows = self.p, self.bounds
        q = self.q if self.q.dtype == p.dtype and self.q.stride(2) == 1 else self.q.to(p.dtype)
        q = q if q.stride(2) == 1 else q.contiguous()
        values = (0, 1, 0)
        if self.v is not None:
            values = (self.v.data_ptr(), self.v.stride(0), self.v.shape[1])
        absorb_part(
            blas.sgemm_address(), (q.data_ptr(), q.stride(0), q.stride(1), p.scale * LOG2E),
            np.array(strips, np.int64), self.k_t.numpy(), values, rows.row, rows.position,
            rows.start, rows.stop, p.sink_keys, self.sink_values, self.learned, rows.feeds,
            rows.block, p.pool or 0, p.tile, self.work.arrays(), sums.arrays(),
            *sums.column_arrays(),
        )  # fmt: skip

    def _absorb_strip(self, sums: Sums, i0: int, i1: int) -> None:
        """One strip, returning to torch for its matrix products and whatever changes logits."""
        p, w, t = self.p, self.work, i1 - i0
        r = self.g * t
        runs = p.runs(self.batch, i0, i1)
        where = places(runs, p.pad)
        tiles = self._tiles(runs, where)
        bounds = self.bounds
        position, lo, hi = (x[i0:i1] for x in (bounds.position, bounds.start, bounds.stop))
        rows = (w.state[:r], w.top[:r], w.sink[:r], w.bands[:r], w.output_array[:r])
        open_rows(*rows)
        peaks = np.empty((len(tiles), r), np.float32)
        q, kept = self._queries(i0, i1), w.kept[:r]
        for x, (j0, j1, place) in enumerate(tiles):
            c = j1 - j0
            logits = w.logits[: r * c].view(r, c)
            torch.mm(q, self.k_t[:, j0:j1], out=logits)
            if self.bounds.holes or p.softcap or p.bias is not None:
                self._finish_logits(logits.view(self.g, t, c), i0, i1, j0, j1)
            absorb_tile(
                x, w.logits_array[: r * c].reshape(r, c), w.kept_array, place, j0, c, position,
                lo, hi, bounds.holes, p.sink_keys, *rows[:4], peaks[x], rows[4],
            )  # fmt: skip
            if self.v is not None:
                self._add_values(w.output[:r], kept[:, place : place + c], self.v[j0:j1])
        table = np.array(tiles, np.int64).reshape(-1, 3)
        factors = np.empty_like(peaks)
        place = where[0] if where else 0
        close_rows(
            *rows, self.learned, position, w.kept_array, place, table, peaks, self.sink_values,
            factors, i0, *sums.arrays(),
        )  # fmt: skip
        if not p.clean_v and sums.output is not None and self.v is not None:
            a = kept[:, place : place + p.sink_keys].reshape(self.g, t, p.sink_keys)
            for head in range(self.g):
                poison(sums.output[head, i0:i1], a[head], self.v[: p.sink_keys])
        received, pooled = sums.column_arrays()
        sum_columns(
            w.kept_array, table, place, p.sink_keys, factors, bounds.feeds[i0:i1],
            bounds.block[i0:i1], p.pool or 0, received, pooled, w.scratch,
        )  # fmt: skip

    def _queries(self, i0: int, i1: int) -> Tensor:
        """Query rows, scaled so that logits come out in base 2: ``(head row) d_head``."""
        p = self.p
        rows = self.q[:, i0:i1] if p.every_row else self.q[:, p.rows[i0:i1]]
        out = self.work.queries[: self.g * (i1 - i0)]
        torch.mul(rows.to(p.dtype), p.scale * LOG2E, out=out.view(rows.shape))
        return out

    def _tiles(self, runs: list[tuple[int, int]], where: list[int]) -> list[tuple[int, int, int]]:
        """Key tiles (start, stop, column of ``kept``)."""
        out = []
        for (start, stop), place in zip(runs, where, strict=True):
            pieces = max(1, -(-(stop - start) // self.p.tile))
            width = -(-(stop - start) // pieces)
            for j0 in range(start, stop, width):
                out.append((j0, min(stop, j0 + width), place + j0 - start))
        return out

    def _finish_logits(self, s: Tensor, i0: int, i1: int, j0: int, j1: int) -> None:
        """Softcap, bias and hidden entries, in place on ``head row key``."""
        p = self.p
        if p.softcap:
            s.div_(p.softcap * LOG2E).tanh_().mul_(p.softcap * LOG2E)
        if p.bias is not None:
            extra = p.bias(self.batch, self.heads, p.rows[i0:i1], range(j0, j1))
            s.add_(extra.to(s.dtype), alpha=LOG2E)
        if not self.bounds.holes:
            return
        first, last = p.row_list[i0] + p.offset, p.row_list[i1 - 1] + p.offset
        at = j0
        for start, stop, full in p.mask.segments(self.batch, first, last, p.keys):
            a, b = max(start, j0), min(stop, j1)
            if a >= b:
                continue
            s[:, :, at - j0 : a - j0] = -math.inf
            if not full:
                query = (p.rows[i0:i1] + p.offset)[:, None]
                seen = p.mask.visible(self.batch, query, torch.arange(a, b)[None, :])
                s[:, :, a - j0 : b - j0].masked_fill_(~seen, -math.inf)
            at = b
        s[:, :, at - j0 :] = -math.inf

    def _add_values(self, o: Tensor, e: Tensor, v: Tensor) -> None:
        """o += e v, without letting a hidden NaN of v through."""
        if self.p.clean_v:
            o.addmm_(e, v)
        else:
            poison(o.addmm_(e, torch.where(torch.isfinite(v), v, 0)), e, v)
