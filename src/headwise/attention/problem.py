"""What one call of streaming attention computes: the rule of the logits, and its checks.

Forward and backward compute the same logits from this one rule, in units of ln 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.attention.bias import BiasFunction
from headwise.attention.heads import group_size
from headwise.attention.masks import Mask
from headwise.attention.state import LOG2E
from headwise.attention.tiles import Tile, hide
from headwise.errors import OptionError, ShapeError

__all__ = ["Problem", "all_finite", "check_shapes", "product", "stacked"]


@dataclass(frozen=True)
class Problem:
    """Mask, scale, softcap, bias and offset of a call, and how its tiles are cut.

    ``rows`` counts the rows of one matrix product (query rows × query heads of one kv head),
    ``width`` the keys of a tile. Results do not depend on them beyond rounding.
    """

    mask: Mask
    scale: float
    softcap: float | None
    bias: BiasFunction | None
    offset: int
    rows: int = 256
    width: int = 1024

    @staticmethod
    def arithmetic(dtype: torch.dtype) -> torch.dtype:
        """float64 for float64, float32 for everything else."""
        return torch.float64 if dtype == torch.float64 else torch.float32

    def strip_rows(self, group: int) -> int:
        """Query rows of a strip when ``group`` query heads are stacked."""
        return max(1, self.rows // group)  # more heads than rows: one row of each

    def positions(self, rows: range) -> range:
        """Where on the key axis these query rows stand."""
        return range(rows.start + self.offset, rows.stop + self.offset)

    @property
    def query_factor(self) -> float:
        """What queries are multiplied by before the product with the keys."""
        return self.scale / self.softcap if self.softcap else self.scale * LOG2E

    @property
    def flush(self) -> bool:
        """Whether negligible weights are made 0: a bias makes many of them (``State``)."""
        return self.bias is not None

    def scratch(self, like: Tensor, group: int, queries: int, keys: int) -> Tensor:
        """Memory for one tile: written again and again, it stays in the processor's cache."""
        rows = group * min(self.strip_rows(group), queries)
        return like.new_empty(rows * min(self.width, keys))

    def logits(
        self,
        q: Tensor,
        k: Tensor,
        batch: int,
        heads: slice,
        rows: range,
        tile: Tile,
        scratch: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of one tile times log2 e, hidden pairs -inf; and tanh(s/c) if capped.

        ``q`` holds the stacked rows ``(head query) d_head`` times ``query_factor``. Both results
        have shape ``(head query) key``; one of them lies in ``scratch``.
        """
        s = product(q, k.T, scratch)
        capped = None
        if self.softcap:
            capped = s.tanh_()
            s = capped * (self.softcap * LOG2E)
        blocks = s.view(heads.stop - heads.start, len(rows), tile.stop - tile.start)
        if self.bias is not None:
            query = torch.arange(rows.start, rows.stop, device=s.device)
            extra = self.bias(batch, heads, query, range(tile.start, tile.stop))
            blocks.add_(extra.to(s.dtype), alpha=LOG2E)
        hide(blocks, tile, -math.inf)
        return s, capped


def product(a: Tensor, b: Tensor, scratch: Tensor) -> Tensor:
    """a b, written to ``scratch``."""
    shape = (a.shape[0], b.shape[1])
    return torch.mm(a, b, out=scratch[: shape[0] * shape[1]].view(shape))


def stacked(x: Tensor) -> Tensor:
    """``head query dim -> (head query) dim``: the rows of all heads that share a kv head."""
    return x.reshape(-1, x.shape[-1])


def all_finite(x: Tensor) -> bool:
    """Whether x can be used in a product as it is (False also when its sum overflows)."""
    return bool(torch.isfinite(x.detach().sum(dtype=Problem.arithmetic(x.dtype))))


def check_shapes(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, softcap: float | None, sinks: Tensor | None
) -> None:
    """Refuse tensors that do not fit together, in one line that says what was found."""
    found = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ShapeError(found, allowed="four axes: batch, head, position, dim")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            found, allowed="one batch; q and k of one width; k and v with one number of heads, keys"
        )
    group_size(q.shape[1], k.shape[1])
    if not (q.dtype == k.dtype == v.dtype and q.is_floating_point()):
        raise ShapeError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}", allowed="one floating-point dtype"
        )
    if softcap is not None and softcap < 0:
        raise OptionError(f"softcap is {softcap}", allowed="above 0, or None")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ShapeError(
            f"sinks of shape {tuple(sinks.shape)} for {q.shape[1]} heads", allowed="one per head"
        )
    batches = None if mask is None else mask.batches()
    if batches is not None and batches != q.shape[0]:
        raise ShapeError(f"a mask for {batches} sequences and q for {q.shape[0]}")
