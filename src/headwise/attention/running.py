"""The running state of a strip's rows, in tensor operations: an online softmax with its sums."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

__all__ = ["TOP_BLOCK", "RunningRows", "finite", "peak_of", "ratio"]

TOP_BLOCK: Final = 128  # keys per block in the search for the largest logit


@dataclass
class RunningRows:
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

    def absorb(self, new: RunningRows) -> RunningRows:
        """Merge a further tile, whose peak is already the maximum of both."""
        drop = torch.where(self.peak == -math.inf, 0.0, self.peak - finite(new.peak))
        shrink = drop.exp2()
        return RunningRows(
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


def peak_of(whole: Tensor) -> tuple[Tensor, Tensor]:
    """Row maxima and their columns, for about the price of the maxima alone.

    The maximum of each block of keys comes first; only the winning block is searched.
    """
    blocks = whole.view(whole.shape[0], -1, TOP_BLOCK)
    best, where = blocks.amax(-1).max(-1, keepdim=True)
    chosen = blocks.gather(1, where[..., None].expand(-1, 1, TOP_BLOCK)).squeeze(1)
    return best, where.squeeze(1) * TOP_BLOCK + chosen.argmax(-1)


def finite(peak: Tensor) -> Tensor:
    """A peak that can be subtracted: rows that see nothing have none, and get 0."""
    return torch.where(peak == -math.inf, 0.0, peak)


def ratio(peak: Tensor, log2_total: Tensor) -> Tensor:
    """2^(peak - total), and 0 for a row whose total is empty."""
    return torch.where(log2_total == -math.inf, 0.0, (peak - log2_total).exp2_())
