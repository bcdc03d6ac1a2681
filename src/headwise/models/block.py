"""A transformer block: attention and feed-forward, each written into the residual stream.

Where the norm stands is a class of its own; a block is put together from them.

    PreNorm    x + f(norm x)          Xiong et al. 2020 (arXiv:2002.04745), figure 1b; GPT-2
    PostNorm   norm(x + f x)          Vaswani et al. 2017 (arXiv:1706.03762), section 3.1
    Sandwich   x + norm'(f(norm x))   Gemma 2 (arXiv:2408.00118), section 2
    Branch     x + norm(f x)          OLMo 2 (arXiv:2501.00656), section 3.2
    parallel   x + f(norm x) + g(norm' x)   GPT-J; GPT-NeoX (arXiv:2204.06745), section 2.1
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from headwise.models.cache import Slot
from headwise.models.context import Context

__all__ = ["Block", "Branch", "ParallelBlock", "PostNorm", "PreNorm", "Sandwich"]


class PreNorm(nn.Module):
    """x + f(norm x): the stream itself is never normed.

    Example:
        >>> import torch
        >>> PreNorm(nn.Identity(), nn.Identity())(torch.ones(2)).tolist()
        [2.0, 2.0]
    """

    def __init__(self, norm: nn.Module, branch: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.branch, self.dropout = norm, branch, _dropout(dropout)

    def write(self, x: Tensor, *rest: Any) -> Tensor:
        """What is added to the stream."""
        return self.dropout(self.branch(self.norm(x), *rest))

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x + self.write(x, *rest)


class PostNorm(nn.Module):
    """norm(x + f x): every sublayer ends in a norm of the whole stream."""

    def __init__(self, norm: nn.Module, branch: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.branch, self.dropout = norm, branch, _dropout(dropout)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return self.norm(x + self.dropout(self.branch(x, *rest)))


class Sandwich(nn.Module):
    """x + norm_after(f(norm x)): what is read and what is written are both normed."""

    def __init__(
        self, norm: nn.Module, branch: nn.Module, norm_after: nn.Module, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm, self.branch, self.norm_after = norm, branch, norm_after
        self.dropout = _dropout(dropout)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x + self.dropout(self.norm_after(self.branch(self.norm(x), *rest)))


class Branch(nn.Module):
    """x + norm(f x): only what is written is normed."""

    def __init__(self, norm: nn.Module, branch: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.branch, self.dropout = norm, branch, _dropout(dropout)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        return x + self.dropout(self.norm(self.branch(x, *rest)))


class Block(nn.Module):
    """Attention, cross-attention if there is any, then feed-forward, one after the other.

    Each part is a placement (``PreNorm``, ``PostNorm``, …) around a ``MultiHeadAttention`` or an
    MLP.
    """

    def __init__(
        self, attention: nn.Module, feed_forward: nn.Module, cross: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.attention, self.cross, self.feed_forward = attention, cross, feed_forward

    def forward(self, x: Tensor, context: Context, slot: Slot | None = None) -> Tensor:
        x = self.attention(x, context, slot)
        if self.cross is not None:
            x = self.cross(x, context, slot)
        return self.feed_forward(x)


class ParallelBlock(nn.Module):
    """x + attention(norm x) + feed-forward(norm' x): both read the same stream."""

    def __init__(self, attention: PreNorm, feed_forward: PreNorm) -> None:
        super().__init__()
        self.attention, self.feed_forward = attention, feed_forward

    def forward(self, x: Tensor, context: Context, slot: Slot | None = None) -> Tensor:
        return self.feed_forward.write(x) + self.attention.write(x, context, slot) + x


def _dropout(share: float) -> nn.Module:
    return nn.Dropout(share) if share else nn.Identity()
