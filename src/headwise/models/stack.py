"""A stack of blocks: the residual stream from the first block to the last norm."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from headwise.models.cache import Cache
from headwise.models.context import Context
from headwise.models.relative import RelativeBias

__all__ = ["BlockStack"]


class BlockStack(nn.Module):
    """Blocks one after the other, then a norm if there is one: ``batch position d_model``.

    ``bias`` gives the bias of all its self-attentions (T5 learns one table for the whole stack).
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        norm: nn.Module | None = None,
        bias: RelativeBias | nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.bias = bias
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor, context: Context, cache: Cache | None = None) -> Tensor:
        if self.bias is not None:
            context.bias = self.bias(context)
        for number, block in enumerate(self.blocks):
            x = block(x, context, None if cache is None else cache.slots[number])
        return x if self.norm is None else self.dropout(self.norm(x))
