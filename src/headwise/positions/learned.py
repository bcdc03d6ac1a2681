"""Learned positions: one trained vector for each position, and none beyond the table.

Gehring et al. 2017 (arXiv:1705.03122), section 3.1; Radford et al. 2018 (GPT), section 4.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headwise.errors import OptionError, ShapeError

__all__ = ["LearnedPositions"]


class LearnedPositions(nn.Module):
    """A table of vectors read by position id: ``… -> … width``, from ``weight`` ``length width``.

    Starts as normal numbers of standard deviation 0.02 (GPT-2, BERT).

    Example:
        >>> LearnedPositions(5, 3)(torch.tensor([[0, 1, 4]])).shape
        torch.Size([1, 3, 3])
    """

    def __init__(self, length: int, width: int) -> None:
        if length < 1 or width < 1:
            raise OptionError(
                f"a table of {length} positions of width {width}",
                allowed="1 or more of each",
                to_do="give the context of the model and its width",
            )
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, width))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, position_ids: Tensor) -> Tensor:
        if position_ids.dtype not in (torch.int64, torch.int32):
            raise ShapeError(
                f"position ids of type {position_ids.dtype}",
                allowed="int64 or int32",
                to_do="number the positions with whole numbers",
            )
        # A compiled graph cannot look at values; there the lookup itself refuses them.
        if position_ids.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in torch.aminmax(position_ids))
            length = self.weight.shape[0]
            if low < 0 or high >= length:
                raise OptionError(
                    f"position {low if low < 0 else high} in a learned table of {length} positions",
                    allowed=f"0 to {length - 1}",
                    to_do="shorten the text or number its positions within the table",
                )
        return nn.functional.embedding(position_ids, self.weight)

    def extra_repr(self) -> str:
        length, width = self.weight.shape
        return f"{length}, {width}"
