"""A stack of blocks: the residual stream from the first block to the last norm."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from headwise.errors import ShapeError
from headwise.models.cache import Cache
from headwise.models.context import Context

__all__ = ["BlockStack"]


class BlockStack(nn.Module):
    """Blocks one after the other, then a norm if there is one: ``batch position d_model``.

    ``bias`` (``RelativeBias``, ``AlibiBias``) makes the bias of all its self-attentions from the
    context: T5 learns one table for the whole stack.
    """

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        norm: nn.Module | None = None,
        bias: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm
        self.bias = bias

    def forward(self, x: Tensor, context: Context, cache: Cache | None = None) -> Tensor:
        if cache is not None and len(cache.slots) != len(self.blocks):
            raise ShapeError(
                f"a cache of {len(cache.slots)} layers for {len(self.blocks)} blocks",
                allowed="one slot for each block",
                to_do="make the cache with Cache.empty(model.architecture, …)",
            )
        if self.bias is not None:
            context.bias = self.bias(context)
        for number, block in enumerate(self.blocks):
            x = block(x, context, None if cache is None else cache.slots[number])
        return x if self.norm is None else self.norm(x)
