"""From token ids to the residual stream, and from its last vector to logits.

Vaswani et al. 2017 (arXiv:1706.03762), section 3.4; tied tables: Press and Wolf 2017
(arXiv:1608.05859); segments and the head of masked models: Devlin et al. 2019 (arXiv:1810.04805).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from headwise.errors import OptionError, ShapeError
from headwise.positions import Layout, sinusoidal

__all__ = ["Pooler", "SinusoidalPositions", "TokenEmbedding", "Transform", "Unembedding"]


class SinusoidalPositions(nn.Module):
    """PE(p), computed and not stored: ``… -> … width`` in float64 (``positions.sinusoidal``)."""

    def __init__(self, width: int, layout: Layout) -> None:
        super().__init__()
        self.width, self.layout = width, layout

    def forward(self, position_ids: Tensor) -> Tensor:
        return sinusoidal(position_ids, self.width, layout=self.layout, dtype=torch.float64)


class TokenEmbedding(nn.Module):
    """norm(scale · E[id] + positions + segments): ``batch position -> batch position d_model``.

    Args:
        tokens: the table E.
        positions: a module from position ids to vectors, or None.
        segments: a table of segments (token types), or None.
        scale: factor of the token vectors (√d_model in the original Transformer).
        norm: applied to the sum, or None.
        dropout: in training only.
    """

    def __init__(
        self,
        tokens: nn.Embedding,
        positions: nn.Module | None = None,
        segments: nn.Embedding | None = None,
        *,
        scale: float = 1.0,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens, self.positions, self.segments = tokens, positions, segments
        self.scale, self.norm = scale, norm
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(
        self, ids: Tensor, position_ids: Tensor, segment_ids: Tensor | None = None
    ) -> Tensor:
        x = self.tokens(_checked("token", ids, self.tokens))
        if self.scale != 1.0:
            # The factor is rounded to the table's precision first, as the models were trained.
            x = x * torch.tensor(self.scale, dtype=x.dtype, device=x.device)
        if self.segments is not None:
            named = torch.zeros_like(ids) if segment_ids is None else segment_ids
            x = x + self.segments(_checked("segment", named, self.segments, ids.shape))
        elif segment_ids is not None:
            raise OptionError(
                "segment ids for a model without segments",
                allowed="a model whose embedding has segments, as BERT's",
                to_do="leave segment_ids out",
            )
        if self.positions is not None:
            x = x + self.positions(position_ids).to(x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


class Unembedding(nn.Module):
    """c·tanh((scale · W x + bias) / c): ``… d_model -> … vocab``; W is the token table if tied."""

    def __init__(
        self,
        weight: nn.Parameter | None,
        *,
        bias: nn.Parameter | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
        transform: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.transform = weight, bias, transform
        self.scale, self.softcap = scale, softcap

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        if self.transform is not None:
            x = self.transform(x)
        if self.scale != 1.0:
            x = x * self.scale
        logits = functional.linear(x, table if self.weight is None else self.weight, self.bias)
        if self.softcap is None:
            return logits
        return torch.tanh(logits / self.softcap) * self.softcap


class Transform(nn.Module):
    """norm(f(W x)): what BERT's head does before the table."""

    def __init__(self, dense: nn.Linear, activation: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.dense, self.activation, self.norm = dense, activation, norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.dense(x)))


class Pooler(nn.Module):
    """tanh(W x_0 + b) of the first position: ``batch position d_model -> batch d_model``."""

    def __init__(self, dense: nn.Linear) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.dense(x[:, 0]))


def _checked(
    what: str, ids: Tensor, table: nn.Embedding, shape: torch.Size | None = None
) -> Tensor:
    """``ids``, refused unless they are rows of the table (values are looked at on the CPU only)."""
    if ids.dtype not in (torch.int64, torch.int32) or (shape is not None and ids.shape != shape):
        axes = "(batch, position)" if shape is None else str(tuple(shape))
        raise ShapeError(
            f"{what} ids of shape {tuple(ids.shape)} and type {ids.dtype}",
            allowed=f"whole numbers {axes}: int64 or int32",
            to_do=f"give one {what} id for each position",
        )
    if ids.device.type == "cpu" and not torch.compiler.is_compiling() and ids.numel():
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= table.num_embeddings:
            raise OptionError(
                f"{what} id {low if low < 0 else high}",
                allowed=f"0 to {table.num_embeddings - 1}",
                to_do="encode the text with the tokenizer of this model",
            )
    return ids
