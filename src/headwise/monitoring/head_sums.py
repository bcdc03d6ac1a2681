"""What the heads of one attention module did in a training step: sums over rows, true maxima.

Sums of two micro-batches, or of two processes, merge into those of both; the mean is taken once, at
the end, so that neither the order nor the sizes of the parts matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

import torch
from torch import Tensor

from headwise.attention.statistics import Statistics, measure
from headwise.observation.biases import tiles
from headwise.observation.call import Call
from headwise.observation.pieces import Piece
from headwise.observation.record import MEANS, row_statistics
from headwise.observation.tap import pieces_of

__all__ = ["FIGURES", "HeadSums", "sums_of"]

# What is averaged over rows, and its name in the record; all of them are of the softmax itself.
FIGURES: Final = {
    "entropy": "entropy",
    "entropy_without_sink": "entropy_without_sink",
    "entropy_without_sink_fraction": "entropy_without_sink_fraction",
    "effective_keys": "effective_keys",
    "jacobian_trace": "jacobian_trace",
    "dead_rows": "dead_rows",
    "dead_rows_not_sink": "dead_rows_not_sink",
    "sink_mass": "sink_mass",
    "logit_std": "logit_std",
}
_AT: Final = [MEANS.index(name) for name in FIGURES]
_COSINE_ROWS: Final = 64


@dataclass(frozen=True, eq=False)
class HeadSums:
    """Of one module: ``head`` maxima, ``figure head`` sums and counts of rows, float64.

    ``norms`` and ``norm_counts`` are (query, key, cosine) by head.
    """

    max_logit: Tensor
    max_abs_logit: Tensor
    sums: Tensor
    counts: Tensor
    norms: Tensor
    norm_counts: Tensor

    def merged(self, other: HeadSums) -> HeadSums:
        """Both parts as one."""
        return HeadSums(
            max_logit=torch.maximum(self.max_logit, other.max_logit),
            max_abs_logit=torch.maximum(self.max_abs_logit, other.max_abs_logit),
            sums=self.sums + other.sums,
            counts=self.counts + other.counts,
            norms=self.norms + other.norms,
            norm_counts=self.norm_counts + other.norm_counts,
        )

    def tensors(self) -> list[Tensor]:
        """All of them, in order: what processes exchange. The first two are maxima."""
        return [getattr(self, field.name) for field in fields(self)]

    def figures(self) -> dict[str, list[float]]:
        """The numbers of the record, by name: one for each head; NaN where nothing was seen."""
        means = self.sums / self.counts
        norms = self.norms / self.norm_counts
        return {
            "max_logit": self.max_logit.tolist(),
            "max_abs_logit": self.max_abs_logit.tolist(),
            **{name: means[i].tolist() for i, name in enumerate(FIGURES)},
            "query_norm": norms[0].tolist(),
            "key_norm": norms[1].tolist(),
            "cosine": norms[2].tolist(),
        }


@torch.no_grad()
def sums_of(call: Call, cross: bool, rows: int | None) -> HeadSums | None:
    """The sums of one call, over all rows or a stratified random sample of ``rows`` a sequence.

    Sampled, means are unbiased, and maxima are those of the rows that were seen. None where a call
    has no row.
    """
    found: HeadSums | None = None
    for piece in pieces_of(call, cross):
        part = _of_piece(call, piece, rows)
        found = part if found is None else found.merged(part)
    return found


def _of_piece(call: Call, piece: Piece, rows: int | None) -> HeadSums:
    q, k, _ = call.part(piece)
    if q.dtype.itemsize < 4:
        q, k = q.float(), k.float()
    bias = call.part_bias(piece)
    shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    mask = call.part_mask(piece)
    sink_keys = max(0, 1 - piece.key_position)
    s = measure(
        q, k, None, mask=mask, scale=call.scale, softcap=call.softcap,
        bias=None if bias is None else tiles(bias, 0, shape), sinks=call.sinks,
        offset=piece.offset, rows=rows, sink_keys=sink_keys, relative=piece.relative,
    )  # fmt: skip
    visible = piece.sinks_visible(s.rows, sink_keys)
    table = row_statistics(s, visible, sink_keys)[_AT].double()  # figure batch head row
    there = torch.isfinite(table)
    norms, norm_counts = _norms(q, k, s, piece)
    return HeadSums(
        max_logit=_largest(s.max_logit),
        max_abs_logit=_largest(s.max_abs_logit),
        sums=torch.where(there, table, 0.0).sum((1, 3)),
        counts=there.sum((1, 3)).double(),
        norms=norms,
        norm_counts=norm_counts,
    )


def _largest(values: Tensor) -> Tensor:
    """Over batch and rows, of each head; −∞ where no row sees a key. NaN stays NaN."""
    empty = torch.isnan(values)
    if bool(empty.all()):
        return torch.full((values.shape[1],), -math.inf, dtype=torch.float64)
    return torch.where(empty, -math.inf, values).amax((0, 2)).double()


def _norms(q: Tensor, k: Tensor, s: Statistics, piece: Piece) -> tuple[Tensor, Tensor]:
    """|q| over the measured rows, |k| over all keys, cos(q, k) over the pairs of sampled rows."""
    chosen = q.index_select(2, s.rows.to(q.device))
    query, key = chosen.norm(dim=-1), k.norm(dim=-1)
    unit_q = q / q.norm(dim=-1, keepdim=True).clamp(min=1e-30)
    unit_k = k / key[..., None].clamp(min=1e-30)
    some = min(_COSINE_ROWS, q.shape[2])
    c = measure(
        unit_q, unit_k, None, mask=piece.mask, scale=1.0, offset=piece.offset, rows=some,
        sink_keys=0, relative=False,
    )  # fmt: skip
    shared = q.shape[1] // k.shape[1]
    cosine, seen = c.mean_logit.double(), torch.isfinite(c.mean_logit)
    sums = torch.stack([
        query.double().sum((0, 2)),
        key.double().sum((0, 2)).repeat_interleave(shared),
        torch.where(seen, cosine, 0.0).sum((0, 2)),
    ])  # fmt: skip
    counts = torch.stack([
        torch.full((q.shape[1],), float(query[:, 0].numel()), dtype=torch.float64),
        torch.full((q.shape[1],), float(key[:, 0].numel()), dtype=torch.float64),
        seen.double().sum((0, 2)),
    ])  # fmt: skip
    return sums, counts.to(sums.device)
