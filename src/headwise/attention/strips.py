"""One pass over query strips: the logits of a few rows against all keys, used for everything.

T query rows at a time meet all the keys they can see, tile by tile, with a running maximum
(Milakov & Gimelshein 2018, arXiv:1805.02867). T rows against all keys is O(n) memory for a fixed
T, so the exponentials are kept until the normaliser of the rows is known; then the same numbers
give the column sums, the pooled map and the distance bands. No second q kᵀ is needed: the matrix
products are those of attention itself.

Logits are in base 2 here (q is scaled by log2 e once): exp2 is the cheaper exponential, and exact
for the rescaling factors. ``statistics.py`` turns the raw sums into natural logarithms and names.

The first ``sink_keys`` keys are kept apart from the tiles, so that statistics without them stay
exact even when a sink takes all but 1e-30 of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from torch import Tensor

from headwise.attention.bands import add_bands
from headwise.attention.masks import Mask, Segment

__all__ = ["LOG2E", "RAW", "Bias", "Problem", "StripPass", "Sums", "Workspace", "places", "poison"]

LOG2E: Final = math.log2(math.e)

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

_TOP_BLOCK: Final = 128  # keys per block in the search for the largest logit
_GAP: Final = 128  # hidden keys between two runs that are still cheaper to compute than to skip


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
    pad: int  # zero columns beside a run, so that skewed views stay inside the buffer
    clean_v: bool  # v has no NaN and no infinity
    bands: int  # distance bands, 0 without a common axis
    runs_by_strip: dict[tuple[int, int, int], list[tuple[int, int]]] = field(default_factory=dict)
    keys_by_head: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k.shape[1]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    def transposed_keys(self, batch: int, kv_head: int) -> Tensor:
        """k of one head as ``d_head key``, contiguous: the layout that makes q kᵀ fastest."""
        name = (batch, kv_head)
        if name not in self.keys_by_head:
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
            if out and start - out[-1][1] < _GAP:
                out[-1] = (out[-1][0], stop)
            else:
                out.append((start, stop))
        return out


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


class Workspace:
    """Buffers that one worker reuses for every strip: ``logits`` of a tile, ``kept`` weights."""

    def __init__(self, problem: Problem, rows: int, width: int) -> None:
        device, dtype = problem.q.device, problem.dtype
        tile = -(-min(problem.tile, problem.keys) // _TOP_BLOCK) * _TOP_BLOCK
        # A stride that is a power of two would make all rows compete for the same cache lines.
        stride = -(-(width + 2 * problem.pad) // 16) * 16 + 16
        self.logits = torch.empty(rows * tile, dtype=dtype, device=device)
        self.kept = torch.zeros(rows, stride, dtype=dtype, device=device)
        blocks = 0 if problem.pool is None else -(-problem.keys // problem.pool) * problem.pool
        self.columns = torch.zeros(problem.group * blocks, dtype=dtype, device=device)


@dataclass
class _Rows:
    """The running state of a strip: everything relative to ``peak`` (shape ``(g·t, 1)``)."""

    peak: Tensor
    total: Tensor
    weighted: Tensor
    square: Tensor
    distance: Tensor
    least: Tensor
    sum_x: Tensor
    sum_xx: Tensor
    count: Tensor
    top: Tensor
    output: Tensor | None

    def absorb(self, new: _Rows) -> _Rows:
        """Merge a further tile, whose peak is already the maximum of both."""
        drop = torch.where(self.peak == -math.inf, 0.0, self.peak - _finite(new.peak))
        shrink = drop.exp2()
        return _Rows(
            peak=new.peak,
            weighted=new.weighted.addcmul_(shrink, self.weighted.addcmul_(drop, self.total)),
            total=new.total.addcmul_(shrink, self.total),
            square=new.square.addcmul_(shrink * shrink, self.square),
            distance=new.distance.addcmul_(shrink, self.distance),
            least=torch.minimum(new.least, self.least + drop),
            sum_xx=new.sum_xx + self.sum_xx + drop * (2 * self.sum_x + self.count * drop),
            sum_x=new.sum_x + self.sum_x + self.count * drop,
            count=new.count + self.count,
            top=torch.where((new.peak > self.peak).squeeze(1), new.top, self.top),
            output=None if self.output is None else new.output,
        )


class StripPass:
    """The pass over the strips of one sequence and one key-value head."""

    def __init__(self, problem: Problem, batch: int, kv_head: int, work: Workspace) -> None:
        p, g = problem, problem.group
        self.p, self.batch, self.work, self.g = p, batch, work, g
        self.heads = slice(kv_head * g, kv_head * g + g)
        self.q = p.q[batch, self.heads]
        self.k = p.k[batch, kv_head].to(p.dtype)
        self.v = None if p.v is None else p.v[batch, kv_head].to(p.dtype)
        self.clean_v = p.clean_v
        self.sinks = None if p.sinks is None else p.sinks[self.heads].to(p.dtype) * LOG2E
        self.columns = torch.arange(p.keys, device=p.q.device)
        self.key_position = self.columns.to(p.dtype)
        self.blocks: dict[tuple[int, ...], Tensor] = {}

    # -- logits ----------------------------------------------------------------------------------

    def queries(self, i0: int, i1: int) -> Tensor:
        """Query rows, scaled so that logits come out in base 2: ``(g·t, d_head)``."""
        p = self.p
        rows = self.q[:, i0:i1] if p.every_row else self.q[:, p.rows[i0:i1]]
        return (rows.to(p.dtype) * (p.scale * LOG2E)).flatten(0, 1)

    def finish_logits(self, s: Tensor, i0: int, i1: int, keys: range) -> Tensor:
        """Softcap, then bias, in place on ``(g, t, keys)``."""
        p = self.p
        if p.softcap:
            s.div_(p.softcap * LOG2E).tanh_().mul_(p.softcap * LOG2E)
        if p.bias is not None:
            extra = p.bias(self.batch, self.heads, p.rows[i0:i1], keys)
            s.add_(extra.to(s.dtype), alpha=LOG2E)
        return s

    def visible(self, i0: int, i1: int, a: int, b: int) -> Tensor:
        """Hidden entries of the block rows i0..i1-1 by keys a..b-1, True = hidden: ``(t, b-a)``."""
        p = self.p
        first = p.row_list[i0] + p.offset
        name = (first - a, i1 - i0, b - a) if p.every_row and p.mask.relative() else None
        if name is None or name not in self.blocks:
            query = (p.rows[i0:i1] + p.offset)[:, None]
            block = ~p.mask.visible(self.batch, query, self.columns[None, a:b])
            block = block.expand(i1 - i0, b - a)
            if name is None:
                return block
            self.blocks[name] = block.contiguous()
        return self.blocks[name]

    def sink_logits(self, i0: int, i1: int) -> Tensor:
        """Logits of the sink keys, -inf where hidden: ``(g, t, s)``."""
        s = self.p.sink_keys
        logits = (self.queries(i0, i1) @ self.k[:s].t()).view(self.g, i1 - i0, s)
        logits = self.finish_logits(logits, i0, i1, range(0, s))
        return logits.masked_fill_(self.visible(i0, i1, 0, s), -math.inf)

    # -- the pass --------------------------------------------------------------------------------

    def absorb(self, sums: Sums, i0: int, i1: int) -> None:
        """Measure the rows i0..i1-1 and add them to ``sums``."""
        p, g, t = self.p, self.g, i1 - i0
        runs = p.runs(self.batch, i0, i1)
        segments = p.segments(self.batch, i0, i1)
        tiles = list(self._tiles(runs, segments))
        sink = self.sink_logits(i0, i1)
        state = None
        q = self.queries(i0, i1)
        kept: list[tuple[Tensor, Tensor]] = []
        for j0, j1, where in tiles:
            out = self.work.kept[: g * t, where : where + j1 - j0]
            state = self._tile(q, i0, i1, j0, j1, segments, out, state)
            kept.append((out, state.peak))
        if state is None:
            state = self._nothing(g * t)
        log2_total = self._normaliser(state, sink)
        self._store(sums, i0, i1, state, sink, log2_total)
        self._weigh(sums, i0, i1, kept, sink, log2_total, runs)

    def _tiles(
        self, runs: list[tuple[int, int]], segments: list[Segment]
    ) -> Iterator[tuple[int, int, int]]:
        """Key tiles and the column of ``kept`` where each goes."""
        p = self.p
        for (start, stop), where in zip(runs, places(runs, self.p.pad), strict=True):
            inside = [s for s in segments if s.start >= start and s.stop <= stop]
            if not inside:
                continue
            lo, hi = inside[0].start, inside[-1].stop
            pieces = max(1, -(-(hi - lo) // p.tile))
            width = -(-(hi - lo) // pieces)
            for j0 in range(lo, hi, width):
                yield j0, min(hi, j0 + width), where + j0 - start

    def _tile(
        self,
        q: Tensor,
        i0: int,
        i1: int,
        j0: int,
        j1: int,
        segments: list[Segment],
        out: Tensor,
        state: _Rows | None,
    ) -> _Rows:
        """Logits of one tile; their exponentials go to ``out``, their sums into the state."""
        p, g, t, c = self.p, self.g, i1 - i0, j1 - j0
        padded = -(-c // _TOP_BLOCK) * _TOP_BLOCK
        whole = self.work.logits[: g * t * padded].view(g * t, padded)
        s = whole[:, :c]
        torch.mm(q, self.k[j0:j1].t(), out=s)
        if padded > c:
            whole[:, c:] = -math.inf
        s3 = s.view(g, t, c)
        if p.softcap or p.bias is not None:
            self.finish_logits(s3, i0, i1, range(j0, j1))
        holes, count, sure = self._holes(i0, i1, j0, j1, segments)
        for a, b, hidden in holes:
            s3[:, :, a - j0 : b - j0].masked_fill_(hidden, -math.inf)
        if p.bias is not None:
            holes, sure = [(j0, j1, s3 == -math.inf)], False
            count = (c - holes[0][2].sum(-1)).view(-1, 1).to(p.dtype)
        peak, top = _peak(whole)
        if state is not None:
            peak = torch.maximum(peak, state.peak)
        s.sub_(peak if sure else _finite(peak))
        torch.exp2(s, out=out)
        for a, b, hidden in holes:
            s3[:, :, a - j0 : b - j0].masked_fill_(hidden, 0)
        total = out.sum(-1, keepdim=True)
        distance = self._distance(out, total, i0, i1, j0, j1) if p.relative else total.clone()
        new = _Rows(
            peak=peak,
            total=total,
            square=torch.linalg.vector_norm(out, dim=-1, keepdim=True).square_(),
            distance=distance,
            least=s.amin(-1, keepdim=True),
            sum_x=s.sum(-1, keepdim=True),
            sum_xx=torch.linalg.vector_norm(s, dim=-1, keepdim=True).square_(),
            count=count,
            weighted=s.mul_(out).sum(-1, keepdim=True),
            top=top + j0,
            output=None,
        )
        old_peak = None if state is None else state.peak
        product = self._product(out, j0, j1, state, old_peak, peak)
        merged = new if state is None else state.absorb(new)
        merged.output = product
        return merged

    def _product(
        self,
        e: Tensor,
        j0: int,
        j1: int,
        state: _Rows | None,
        old_peak: Tensor | None,
        peak: Tensor,
    ) -> Tensor | None:
        """Σ_j e_ij v_j, added to the rescaled output so far."""
        if self.v is None:
            return None
        v = self.v[j0:j1]
        if not self.clean_v:
            v = torch.where(torch.isfinite(v), v, 0)
        if state is None or state.output is None or old_peak is None:
            o = torch.mm(e, v)
        else:
            shrink = torch.where(old_peak == -math.inf, 0.0, old_peak - _finite(peak)).exp2()
            o = state.output.mul_(shrink).addmm_(e, v)
        return o if self.clean_v else poison(o, e, self.v[j0:j1])

    def _holes(
        self, i0: int, i1: int, j0: int, j1: int, segments: list[Segment]
    ) -> tuple[list[tuple[int, int, Tensor]], Tensor, bool]:
        """Hidden parts of a tile, visible keys per row, and whether every row sees some key."""
        p, g, t = self.p, self.g, i1 - i0
        holes: list[tuple[int, int, Tensor]] = []
        full, at = 0, j0
        partial = torch.zeros((), device=p.q.device, dtype=torch.int64)
        for start, stop, is_full in segments:
            a, b = max(start, j0), min(stop, j1)
            if a >= b:
                continue
            if a > at:
                holes.append((at, a, torch.ones((), dtype=torch.bool, device=p.q.device)))
            at = b
            if is_full:
                full += b - a
            else:
                hidden = self.visible(i0, i1, a, b)
                partial = partial + (b - a) - hidden.sum(-1)
                holes.append((a, b, hidden))
        if at < j1:
            holes.append((at, j1, torch.ones((), dtype=torch.bool, device=p.q.device)))
        count = (partial + full).expand(t).repeat(g)[:, None].to(p.dtype)
        return holes, count, full > 0

    def _distance(self, e: Tensor, total: Tensor, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        """Σ_j e_ij |position_i - j|, linear in j where no key is ahead of its query."""
        p, g, t = self.p, self.g, i1 - i0
        first, last = p.row_list[i0] + p.offset, p.row_list[i1 - 1] + p.offset
        ahead = (p.rows[i0:i1] + (p.offset - first)).to(p.dtype).repeat(g)[:, None]
        if j1 - 1 <= first or not p.mask.looks_ahead():
            far = torch.mv(e, first - self.key_position[j0:j1])[:, None]
            return far.addcmul_(ahead, total)
        if j0 >= last:
            far = torch.mv(e, self.key_position[j0:j1] - first)[:, None]
            return far.addcmul_(ahead, total, value=-1)
        apart = (ahead[:t] + first - self.key_position[None, j0:j1]).abs_()
        return (e.view(g, t, -1) * apart).sum(-1).view(-1, 1)

    def _nothing(self, rows: int) -> _Rows:
        """The empty state: no key seen yet."""
        p = self.p
        zero = torch.zeros(rows, 1, dtype=p.dtype, device=p.q.device)
        none = torch.full_like(zero, -math.inf)
        output = None if self.v is None else zero.expand(-1, self.v.shape[1]).clone()
        top = torch.full((rows,), -1, device=p.q.device)
        return _Rows(none, zero, zero, zero, zero, zero, zero, zero, zero, top, output)

    # -- after the tiles -------------------------------------------------------------------------

    def _normaliser(self, state: _Rows, sink: Tensor) -> Tensor:
        """log2 of each row's denominator, ``(g, t)``; -inf for a row that sees nothing."""
        parts = [(state.peak + state.total.log2()).view(self.g, -1, 1), sink]
        if self.sinks is not None:
            parts.append(self.sinks.view(-1, 1, 1).expand(-1, sink.shape[1], 1))
        logits = torch.cat(parts, -1)
        top = _finite(logits.amax(-1, keepdim=True))
        return (logits - top).exp2_().sum(-1).log2_() + top.squeeze(-1)

    def _store(
        self, sums: Sums, i0: int, i1: int, state: _Rows, sink: Tensor, log2_total: Tensor
    ) -> None:
        """Keep the raw sums of the rows, and their output."""
        p, g = self.p, self.g
        columns = [getattr(state, name) for name in RAW[:9]]
        sums.raw[:9, :, i0:i1] = torch.cat(columns, 1).t().view(9, g, -1)
        sums.sink_logits[:, i0:i1] = sink
        sums.log2_total[:, i0:i1] = log2_total
        sums.top_key[:, i0:i1] = state.top.view(g, -1)
        if sums.output is not None and state.output is not None and self.v is not None:
            factor = _ratio(state.peak.view(g, -1), log2_total)
            o = state.output.view(g, i1 - i0, -1).mul_(factor[..., None])
            a = _ratio(sink, log2_total[..., None])
            v = self.v[: p.sink_keys]
            if self.clean_v:
                o.add_(a @ v)
            else:
                o.add_(a @ torch.where(torch.isfinite(v), v, 0))
                poison(o.view(-1, o.shape[-1]), a.flatten(0, 1), v)
            sums.output[:, i0:i1] = o

    def _weigh(
        self,
        sums: Sums,
        i0: int,
        i1: int,
        kept: list[tuple[Tensor, Tensor]],
        sink: Tensor,
        log2_total: Tensor,
        runs: list[tuple[int, int]],
    ) -> None:
        """Turn the kept exponentials into weights and add up columns, blocks, bands, diagonals."""
        p, g, t = self.p, self.g, i1 - i0
        for out, peak in kept:
            out.mul_(_ratio(peak, log2_total.view(-1, 1)))
        feeds = None
        if p.keep is not None:
            feeds = p.keep[self.batch, p.rows[i0:i1]].repeat(g)[:, None]
        for (start, stop), where in zip(runs, places(runs, p.pad), strict=True):
            a = self.work.kept[: g * t, where : where + stop - start]
            self._fill_gaps(a, start, i0, i1, sink, log2_total)
            self._clear_pads(g * t, where, stop - start)
            if p.relative:
                self._diagonals(sums, i0, i1, a, start)
                if sums.bands is not None:
                    first = p.row_list[i0] + p.offset if p.every_row else None
                    position = p.rows[i0:i1] + p.offset
                    target = sums.bands[:, i0:i1]
                    add_bands(target, a, g, start, position, first, p.pad, p.mask.looks_ahead())
            if feeds is not None:
                a.mul_(feeds)
            self._columns(sums, i0, i1, a, start, stop)

    def _fill_gaps(
        self, a: Tensor, start: int, i0: int, i1: int, sink: Tensor, log2_total: Tensor
    ) -> None:
        """Write the sinks' weights, and zeros into columns between sinks and the first tile."""
        s = self.p.sink_keys
        if start != 0 or not s:
            return
        a[:, :s] = _ratio(sink, log2_total[..., None]).flatten(0, 1)
        inside = [x for x in self.p.segments(self.batch, i0, i1) if x.start < a.shape[1]]
        if inside and inside[0].start > s:
            a[:, s : inside[0].start] = 0

    def _clear_pads(self, rows: int, where: int, width: int) -> None:
        """Zeros on both sides of a run: skewed views read over its edges."""
        pad = self.p.pad
        if where > pad:
            self.work.kept[:rows, where - pad : where] = 0
        self.work.kept[:rows, where + width : where + width + pad] = 0

    def _diagonals(self, sums: Sums, i0: int, i1: int, a: Tensor, start: int) -> None:
        """The weights on the query's own key and on the one before it."""
        p, g = self.p, self.g
        width = a.shape[1]
        columns = p.rows[i0:i1] + (p.offset - start)
        for slot, back in ((10, 0), (11, 1)):
            first = p.row_list[i0] + p.offset - start - back
            last = p.row_list[i1 - 1] + p.offset - start - back
            if last < 0 or first >= width:
                continue
            at = columns - back
            inside = (at >= 0) & (at < width)
            index = at.clamp(0, width - 1).repeat(g)[:, None]
            sums.raw[slot, :, i0:i1] += a.gather(1, index).view(g, -1) * inside

    def _columns(self, sums: Sums, i0: int, i1: int, a: Tensor, start: int, stop: int) -> None:
        """Column sums of a run, and its blocks of the pooled map."""
        p, g, t = self.p, self.g, i1 - i0
        a3 = a.view(g, t, -1)
        if sums.pooled is None or p.pool is None:
            sums.received[:, start:stop] += a3.sum(1)
            return
        w = p.pool
        zero = (p.row_list[0] + p.offset) // w
        blocks = [(p.row_list[i] + p.offset) // w - zero for i in (i0, i1 - 1)]
        lo, hi = start // w * w, -(-stop // w) * w
        if blocks[0] == blocks[1]:
            parts = [(blocks[0], a3.sum(1))]
        elif p.every_row:
            head = (p.row_list[i0] + p.offset) % w
            parts = []
            for row in range(blocks[0], blocks[1] + 1):
                x0 = max(0, (row - blocks[0]) * w - head)
                x1 = min(t, (row - blocks[0] + 1) * w - head)
                parts.append((row, a3[:, x0:x1].sum(1)))
        else:
            rows = ((p.rows[i0:i1] + p.offset) // w - zero).tolist()
            parts = [(row, a3[:, x]) for x, row in enumerate(rows)]
        for row, column_sums in parts:
            sums.received[:, start:stop] += column_sums
            padded = self.work.columns[: g * (hi - lo)].view(g, hi - lo)
            padded.zero_()
            padded[:, start - lo : stop - lo] = column_sums
            sums.pooled[:, row, lo // w : hi // w] += padded.view(g, -1, w).sum(-1)


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


def _peak(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Row maxima and their columns, for about the price of the maxima alone.

    The maximum of each block of keys comes first; only the winning block is searched.
    """
    blocks = whole.view(whole.shape[0], -1, _TOP_BLOCK)
    best, where = blocks.amax(-1).max(-1, keepdim=True)
    chosen = blocks.gather(1, where[..., None].expand(-1, 1, _TOP_BLOCK)).squeeze(1)
    return best, where.squeeze(1) * _TOP_BLOCK + chosen.argmax(-1)


def _finite(peak: Tensor) -> Tensor:
    """A peak that can be subtracted: rows that see nothing have none, and get 0."""
    return torch.where(peak == -math.inf, 0.0, peak)


def _ratio(peak: Tensor, log2_total: Tensor) -> Tensor:
    """2^(peak - total), and 0 for a row whose total is empty."""
    return torch.where(log2_total == -math.inf, 0.0, (peak - log2_total).exp2_())
