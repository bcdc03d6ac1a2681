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

from headwise.attention.kernels import LEAST, PEAK, STATE, absorb_tile, close_rows, sum_columns
from headwise.attention.strips import LOG2E, Problem, Sums, places, poison

__all__ = ["CompiledPass", "CompiledWorkspace"]

_CHUNK = 1024  # columns summed at a time, so that the partial sums stay in the nearest cache


class CompiledWorkspace:
    """Buffers that one worker reuses for every strip."""

    def __init__(self, problem: Problem, rows: int, width: int) -> None:
        # A stride that is a power of two would make all rows compete for the same cache lines.
        stride = -(-width // 16) * 16 + 16
        self.logits = torch.empty(rows * min(problem.tile, problem.keys), dtype=problem.dtype)
        self.kept = torch.zeros(rows, stride, dtype=problem.dtype)
        self.kept_array = self.kept.numpy()
        self.scratch = np.empty(_CHUNK, np.float32)


class CompiledPass:
    """The pass over the strips of one sequence and one key-value head."""

    def __init__(
        self, problem: Problem, batch: int, kv_head: int, work: CompiledWorkspace
    ) -> None:
        p, g = problem, problem.group
        self.p, self.batch, self.work, self.g = p, batch, work, g
        self.heads = slice(kv_head * g, kv_head * g + g)
        self.q = p.q[batch, self.heads]
        self.k_t = p.k[batch, kv_head].to(p.dtype).t()
        self.v = None if p.v is None else p.v[batch, kv_head].to(p.dtype)
        learned = np.empty(0, np.float32)
        if p.sinks is not None:
            learned = (p.sinks[self.heads].to(p.dtype) * LOG2E).numpy()
        self.learned = learned

    def absorb(self, sums: Sums, i0: int, i1: int) -> None:
        """Measure the rows i0..i1-1 and add them to ``sums``."""
        p, g, t = self.p, self.g, i1 - i0
        r, s = g * t, p.sink_keys
        runs = p.runs(self.batch, i0, i1)
        where = places(runs, p.pad)
        tiles = self._tiles(runs, where)
        position = p.rows[i0:i1] + p.offset
        lo, hi, holes = self._bounds(position)
        state = np.zeros((r, STATE), np.float32)
        state[:, PEAK] = -np.inf
        top = np.full(r, -1, np.int64)
        sink = np.full((r, s), -np.inf, np.float32)
        bands = np.zeros((r, 0 if sums.bands is None else sums.bands.shape[-1]), np.float32)
        peaks = np.empty((len(tiles), r), np.float32)
        o = torch.zeros(r, 0 if self.v is None else self.v.shape[-1])
        rows = self.q[:, i0:i1] if p.every_row else self.q[:, p.rows[i0:i1]]
        q = (rows.to(p.dtype) * (p.scale * LOG2E)).reshape(r, -1)
        spot = position.numpy()
        for x, (j0, j1, place) in enumerate(tiles):
            logits = self.work.logits[: r * (j1 - j0)].view(r, j1 - j0)
            torch.mm(q, self.k_t[:, j0:j1], out=logits)
            self._finish_logits(logits.view(g, t, -1), i0, i1, j0, j1, holes)
            absorb_tile(
                logits.numpy(), self.work.kept_array, place, j0, j1 - j0, spot, lo, hi, holes, s,
                state, top, sink, bands, peaks[x], o.numpy(),
            )  # fmt: skip
            self._add_values(o, self.work.kept[:r, place : place + j1 - j0], j0, j1)
        table = np.array(tiles, np.int64).reshape(-1, 3)
        total, factors = np.empty(r, np.float32), np.empty_like(peaks)
        diagonal = np.zeros((2, r), np.float32)
        ends = np.array([(a, b, w) for (a, b), w in zip(runs, where, strict=True)], np.int64)
        close_rows(
            state, sink, self.learned, spot, self.work.kept_array, ends.reshape(-1, 3), table,
            peaks, bands, o.numpy(), self._sink_values(), total, factors, diagonal,
        )  # fmt: skip
        self._store(sums, i0, i1, state, sink, total, top, bands, diagonal, o)
        self._sum_columns(sums, i0, i1, table, factors, where)

    def _tiles(
        self, runs: list[tuple[int, int]], where: list[int]
    ) -> list[tuple[int, int, int]]:
        """Key tiles (start, stop, column of ``kept``)."""
        out = []
        for (start, stop), place in zip(runs, where, strict=True):
            pieces = max(1, -(-(stop - start) // self.p.tile))
            width = -(-(stop - start) // pieces)
            for j0 in range(start, stop, width):
                out.append((j0, min(stop, j0 + width), place + j0 - start))
        return out

    def _bounds(self, position: Tensor) -> tuple[np.ndarray, np.ndarray, bool]:
        """The keys each row sees: a range, or everything with hidden logits set to -inf."""
        found = self.p.mask.interval(self.batch, position, self.p.keys)
        if found is None:
            found = torch.zeros_like(position), torch.full_like(position, self.p.keys)
            return found[0].numpy(), found[1].numpy(), True
        start, stop = found
        return start.numpy(), stop.numpy(), self.p.bias is not None

    def _finish_logits(
        self, s: Tensor, i0: int, i1: int, j0: int, j1: int, holes: bool
    ) -> None:
        """Softcap, bias and hidden entries, in place on ``head row key``."""
        p = self.p
        if p.softcap:
            s.div_(p.softcap * LOG2E).tanh_().mul_(p.softcap * LOG2E)
        if p.bias is not None:
            extra = p.bias(self.batch, self.heads, p.rows[i0:i1], range(j0, j1))
            s.add_(extra.to(s.dtype), alpha=LOG2E)
        if not holes:
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

    def _add_values(self, o: Tensor, e: Tensor, j0: int, j1: int) -> None:
        """o += e v, without letting a hidden NaN of v through."""
        if self.v is None:
            return
        v = self.v[j0:j1]
        if self.p.clean_v:
            o.addmm_(e, v)
        else:
            poison(o.addmm_(e, torch.where(torch.isfinite(v), v, 0)), e, v)

    def _sink_values(self) -> np.ndarray:
        if self.v is None:
            return np.empty((0, 0), np.float32)
        return self.v[: self.p.sink_keys].contiguous().numpy()

    def _store(
        self,
        sums: Sums,
        i0: int,
        i1: int,
        state: np.ndarray,
        sink: np.ndarray,
        total: np.ndarray,
        top: np.ndarray,
        bands: np.ndarray,
        diagonal: np.ndarray,
        o: Tensor,
    ) -> None:
        """Put the rows' sums where they belong."""
        g, t = self.g, i1 - i0
        sums.raw[:STATE, :, i0:i1] = torch.from_numpy(state.T.copy()).view(STATE, g, t)
        if self.p.relative:
            sums.raw[STATE:, :, i0:i1] = torch.from_numpy(diagonal).view(2, g, t)
        sums.sink_logits[:, i0:i1] = torch.from_numpy(sink).view(g, t, -1)
        sums.log2_total[:, i0:i1] = torch.from_numpy(total).view(g, t)
        sums.top_key[:, i0:i1] = torch.from_numpy(top).view(g, t)
        if sums.bands is not None:
            sums.bands[:, i0:i1] = torch.from_numpy(bands).view(g, t, -1)
        if sums.output is not None:
            sums.output[:, i0:i1] = o.view(g, t, -1)

    def _sum_columns(
        self,
        sums: Sums,
        i0: int,
        i1: int,
        tiles: np.ndarray,
        factors: np.ndarray,
        where: list[int],
    ) -> None:
        """Add the strip's weights to the column sums and the pooled map."""
        p, g = self.p, self.g
        feeds = np.ones(g * (i1 - i0), np.float32)
        if p.keep is not None:
            feeds = p.keep[self.batch, p.rows[i0:i1]].to(p.dtype).repeat(g).numpy()
            factors = factors * feeds
        pool = p.pool or 0
        block = np.zeros(i1 - i0, np.int64)
        pooled = np.zeros((g, 0, 0), np.float32)
        if sums.pooled is not None and pool:
            zero = (p.row_list[0] + p.offset) // pool
            block = ((p.rows[i0:i1] + p.offset) // pool - zero).numpy()
            pooled = sums.pooled.numpy()
        sum_columns(
            self.work.kept_array, tiles, where[0] if where else 0, p.sink_keys, factors, feeds,
            block, pool, sums.received.numpy(), pooled, self.work.scratch,
        )  # fmt: skip
