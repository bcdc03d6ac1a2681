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
from collections.abc import Iterator

import torch
from torch import Tensor

from headwise.attention.bands import add_bands
from headwise.attention.masks import Segment
from headwise.attention.plan import LOG2E, RAW, Problem, Sums, places, poison
from headwise.attention.running import TOP_BLOCK, RunningRows, finite, peak_of, ratio

__all__ = ["StripPass", "Workspace"]


class Workspace:
    """Buffers that one worker reuses for every strip: ``logits`` of a tile, ``kept`` weights."""

    def __init__(self, problem: Problem, rows: int, width: int) -> None:
        device, dtype = problem.q.device, problem.dtype
        tile = -(-min(problem.tile, problem.keys) // TOP_BLOCK) * TOP_BLOCK
        # A stride that is a power of two would make all rows compete for the same cache lines.
        stride = -(-(width + 2 * problem.pad) // 16) * 16 + 16
        self.logits = torch.empty(rows * tile, dtype=dtype, device=device)
        self.kept = torch.zeros(rows, stride, dtype=dtype, device=device)
        blocks = 0 if problem.pool is None else -(-problem.keys // problem.pool) * problem.pool
        self.columns = torch.zeros(problem.group * blocks, dtype=dtype, device=device)


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

    def absorb(self, sums: Sums, strips: list[tuple[int, int]]) -> None:
        """Measure these strips and add them to ``sums``."""
        for i0, i1 in strips:
            self._absorb_strip(sums, i0, i1)

    def _absorb_strip(self, sums: Sums, i0: int, i1: int) -> None:
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
        state: RunningRows | None,
    ) -> RunningRows:
        """Logits of one tile; their exponentials go to ``out``, their sums into the state."""
        p, g, t, c = self.p, self.g, i1 - i0, j1 - j0
        padded = -(-c // TOP_BLOCK) * TOP_BLOCK
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
        peak, top = peak_of(whole)
        if state is not None:
            peak = torch.maximum(peak, state.peak)
        s.sub_(peak if sure else finite(peak))
        torch.exp2(s, out=out)
        for a, b, hidden in holes:
            s3[:, :, a - j0 : b - j0].masked_fill_(hidden, 0)
        total = out.sum(-1, keepdim=True)
        distance = self._distance(out, total, i0, i1, j0, j1) if p.relative else total.clone()
        new = RunningRows(
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
        state: RunningRows | None,
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
            shrink = torch.where(old_peak == -math.inf, 0.0, old_peak - finite(peak)).exp2()
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

    def _nothing(self, rows: int) -> RunningRows:
        """The empty state: no key seen yet."""
        p = self.p
        zero = torch.zeros(rows, 1, dtype=p.dtype, device=p.q.device)
        none = torch.full_like(zero, -math.inf)
        output = None if self.v is None else zero.expand(-1, self.v.shape[1]).clone()
        top = torch.full((rows,), -1, device=p.q.device)
        return RunningRows(none, zero, zero, zero, zero, zero, zero, zero, zero, top, output)

    # -- after the tiles -------------------------------------------------------------------------

    def _normaliser(self, state: RunningRows, sink: Tensor) -> Tensor:
        """log2 of each row's denominator, ``(g, t)``; -inf for a row that sees nothing."""
        parts = [(state.peak + state.total.log2()).view(self.g, -1, 1), sink]
        if self.sinks is not None:
            parts.append(self.sinks.view(-1, 1, 1).expand(-1, sink.shape[1], 1))
        logits = torch.cat(parts, -1)
        top = finite(logits.amax(-1, keepdim=True))
        return (logits - top).exp2_().sum(-1).log2_() + top.squeeze(-1)

    def _store(
        self, sums: Sums, i0: int, i1: int, state: RunningRows, sink: Tensor, log2_total: Tensor
    ) -> None:
        """Keep the raw sums of the rows, and their output."""
        p, g = self.p, self.g
        columns = [getattr(state, name) for name in RAW[:9]]
        sums.raw[:9, :, i0:i1] = torch.cat(columns, 1).t().view(9, g, -1)
        sums.sink_logits[:, i0:i1] = sink
        sums.log2_total[:, i0:i1] = log2_total
        sums.top_key[:, i0:i1] = state.top.view(g, -1)
        if sums.output is not None and state.output is not None and self.v is not None:
            factor = ratio(state.peak.view(g, -1), log2_total)
            o = state.output.view(g, i1 - i0, -1).mul_(factor[..., None])
            a = ratio(sink, log2_total[..., None])
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
            out.mul_(ratio(peak, log2_total.view(-1, 1)))
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
        a[:, :s] = ratio(sink, log2_total[..., None]).flatten(0, 1)
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
