"""What the heads of one attention module did in a training step: sums over rows, true maxima.

Sums of two micro-batches, or of two processes, merge into those of both; the mean is taken once, at
the end, so that neither the order nor the sizes of the parts matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from headwise.attention.statistics import Statistics, choose_rows, measure
from headwise.observation.biases import tiles
from headwise.observation.call import Call
from headwise.observation.pieces import Piece
from headwise.observation.record import MEANS, row_statistics
from headwise.observation.tap import Seen

__all__ = ["FIGURES", "MAXIMA", "HeadSums", "sums_of"]

# What is averaged over rows; all of them are of the softmax itself.
FIGURES: Final = (
    "entropy",
    "entropy_without_sink",
    "entropy_without_sink_fraction",
    "effective_keys",
    "jacobian_trace",
    "dead_rows",
    "dead_rows_not_sink",
    "sink_mass",
    "logit_std",
)
MAXIMA: Final = ("max_logit", "max_abs_logit")
_NORMS: Final = ("query_norm", "key_norm", "cosine")  # over rows, over keys, over pairs
_AT: Final = [MEANS.index(name) for name in FIGURES]
_TINY: Final = 1e-30
_COSINE_ROWS: Final = 64  # where the keys of a row are not one run


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Of one module, float64 on the CPU.

    ``maxima`` (max_logit, max_abs_logit) ``2 head``; ``sums`` and ``counts``: ``figure head``, the
    figures of ``FIGURES`` and then |q|, |k| and cos(q, k). Of sampled rows, each stands for its
    share of the rows that there are, so that both are unbiased estimates.
    """

    maxima: Tensor
    sums: Tensor
    counts: Tensor

    @staticmethod
    def empty(heads: int) -> HeadSums:
        """Of a module that has seen nothing."""
        nothing = torch.zeros(len(FIGURES) + len(_NORMS), heads, dtype=torch.float64)
        maxima = torch.full((len(MAXIMA), heads), -math.inf, dtype=torch.float64)
        return HeadSums(maxima, nothing, nothing.clone())

    @property
    def max_logit(self) -> Tensor:
        """The largest logit of each head; −∞ where nothing was seen."""
        return self.maxima[0]

    def merged(self, other: HeadSums) -> HeadSums:
        """Both parts as one."""
        return HeadSums(
            maxima=torch.maximum(self.maxima, other.maxima),
            sums=self.sums + other.sums,
            counts=self.counts + other.counts,
        )

    def figures(self) -> dict[str, list[float]]:
        """The numbers of the record, by name: one for each head; NaN where nothing was seen."""
        maxima = torch.where(self.maxima == -math.inf, math.nan, self.maxima)
        means = self.sums / self.counts
        names = (*MAXIMA, *FIGURES, *_NORMS)
        return dict(zip(names, torch.cat((maxima, means)).tolist(), strict=True))


@torch.no_grad()
def sums_of(seen: Seen, rows: int | None = None, seed: int = 0) -> HeadSums | None:
    """The sums of one call, over all rows or a stratified random sample of ``rows`` a sequence.

    Sampled, sums and counts are unbiased, and maxima are those of the rows that were seen. None
    where a call has no row.
    """
    found: HeadSums | None = None
    for piece in seen.pieces:
        part = _of_piece(seen.call, piece, rows, seed)
        found = part if found is None else found.merged(part)
    return found


def _of_piece(call: Call, piece: Piece, rows: int | None, seed: int) -> HeadSums:
    q, k, _ = call.part(piece)
    if q.dtype.itemsize < 4:
        q, k = q.float(), k.float()
    bias = call.part_bias(piece)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    sink_keys = max(0, 1 - piece.key_position)
    sampled = rows is not None and rows < shape[2]
    s = measure(
        q, k, None, mask=call.part_mask(piece), scale=call.scale, softcap=call.softcap,
        bias=None if bias is None else tiles(bias, 0, shape), sinks=call.sinks,
        offset=piece.offset, rows=choose_rows(rows, shape[2], seed) if sampled and rows else None,
        sink_keys=sink_keys, relative=piece.relative,
    )  # fmt: skip
    measured = s.rows.cpu()
    visible = piece.sinks_visible(measured, sink_keys).to(q.device)
    table = row_statistics(s, visible, sink_keys)[_AT]  # figure batch head row
    there = torch.isfinite(table)
    share = shape[2] / measured.numel()
    sums, counts = _norms(call, piece, q, k, measured, seed)
    flat = torch.cat([
        _largest(torch.stack((s.max_logit, s.max_abs_logit)), s),
        torch.where(there, table, 0.0).sum((1, 3), dtype=torch.float64) * share,
        sums,
        there.sum((1, 3)).double() * share,
        counts,
    ]).cpu()  # fmt: skip
    figures = len(FIGURES) + len(_NORMS)
    return HeadSums(*flat.split((len(MAXIMA), figures, figures)))


def _largest(values: Tensor, s: Statistics) -> Tensor:
    """Over batch and rows, of each head; −∞ where no row sees a key. NaN stays NaN."""
    return values.masked_fill(s.visible == 0, -math.inf).amax((1, 3)).double()


def _norms(
    call: Call, piece: Piece, q: Tensor, k: Tensor, rows: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """|q| over the measured rows, |k| over all keys, cos(q, k) over the visible pairs of a row."""
    share, shared = q.shape[2] / rows.numel(), q.shape[1] // k.shape[1]
    chosen = q if rows.numel() == q.shape[2] else q.index_select(2, rows.to(q.device))
    query, key = chosen.norm(dim=-1), k.norm(dim=-1)
    unit_k = k / key[..., None].clamp(min=_TINY)
    mask, runs = call.part_mask(piece), None
    if mask.batches() is None and not call.bias_hides:
        runs = mask.interval(0, rows + piece.offset, k.shape[2])
    if runs is None:
        cosine, pairs = _cosine_of_some(call, piece, q, unit_k, seed)
    else:
        cosine, pairs = _cosine_of_runs(chosen / query[..., None].clamp(min=_TINY), unit_k, *runs)
        cosine, pairs = cosine * share, pairs * share
    sums = torch.stack([
        query.sum((0, 2), dtype=torch.float64) * share,
        key.sum((0, 2), dtype=torch.float64).repeat_interleave(shared),
        cosine,
    ])  # fmt: skip
    counts = torch.ones_like(sums)
    counts[0] *= q.shape[0] * q.shape[2]
    counts[1] *= k.shape[0] * k.shape[2]
    counts[2] *= pairs
    return sums, counts


def _cosine_of_runs(
    unit_q: Tensor, unit_k: Tensor, start: Tensor, stop: Tensor
) -> tuple[Tensor, Tensor]:
    """Σ over rows of the mean over their keys ``head``, and how many rows have a key.

    The mean of q · k over a run of keys is q · (mean of the keys), a difference of running sums:
    O(n d) for all rows, in float64, one key-value head at a time.
    """
    kv_heads = unit_k.shape[1]
    seen = (stop > start).to(unit_q.device)
    first, last = (x.clamp(min=0).to(unit_q.device) for x in (start, stop))
    width = (last - first).clamp(min=1)[:, None]
    total = unit_q.new_zeros(unit_q.shape[1], dtype=torch.float64)
    for h, queries in enumerate(unit_q.split(unit_q.shape[1] // kv_heads, 1)):
        running = nn.functional.pad(unit_k[:, h].double().cumsum(1), (0, 0, 1, 0))
        means = (running[:, last] - running[:, first]) / width * seen[:, None]
        of_group = torch.einsum("bgrd,brd->g", queries, means.to(queries.dtype))
        total[h * of_group.numel() : (h + 1) * of_group.numel()] = of_group
    return total, seen.sum() * unit_q.shape[0]


def _cosine_of_some(
    call: Call, piece: Piece, q: Tensor, unit_k: Tensor, seed: int
) -> tuple[Tensor, Tensor]:
    """The same where the keys of a row are not one run: by a sample of rows, key by key."""
    rows = choose_rows(_COSINE_ROWS, q.shape[2], seed)
    unit_q = q / q.norm(dim=-1, keepdim=True).clamp(min=_TINY)
    bias = call.part_bias(piece) if call.bias_hides else None
    shape = (q.shape[0], q.shape[1], q.shape[2], unit_k.shape[2])
    if isinstance(bias, Tensor):
        bias = torch.where(bias == -math.inf, bias, 0.0)
    found = measure(
        unit_q, unit_k, None, mask=call.part_mask(piece), scale=1.0, offset=piece.offset,
        bias=None if bias is None else tiles(bias, 0, shape), rows=rows, sink_keys=0,
        relative=False,
    )  # fmt: skip
    seen, share = found.visible > 0, q.shape[2] / rows.numel()
    mean = torch.where(seen, found.mean_logit, 0.0).sum((0, 2), dtype=torch.float64)
    return mean * share, seen.sum((0, 2)).double() * share
