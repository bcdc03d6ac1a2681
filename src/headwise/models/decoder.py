"""The decoder: each position predicts the next token from those before it."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.attention.masks import Mask
from headwise.models.architecture import Architecture
from headwise.models.cache import Cache
from headwise.models.embedding import TokenEmbedding, Unembedding
from headwise.models.passes import begin
from headwise.models.stack import BlockStack

__all__ = ["Decoder"]


class Decoder(nn.Module):
    """Embedding, causal blocks, unembedding: ``batch position`` ids -> logits.

    Put together from its parts; ``build`` makes them from an ``Architecture``.

    Attributes:
        architecture: what it was built from.
        allow_long: go on past the context that the architecture names.

    Example:
        >>> import torch
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny"))
        >>> model(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 257])
    """

    def __init__(
        self,
        architecture: Architecture,
        embedding: TokenEmbedding,
        decoder: BlockStack,
        unembedding: Unembedding,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.embedding, self.decoder, self.unembedding = embedding, decoder, unembedding
        self.allow_long = False

    def hidden(
        self,
        ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The stream after the last norm: ``batch position d_model``.

        Args:
            ids: token ids ``batch position``.
            position_ids: ``position`` or ``batch position``; None counts on from the cache.
            mask: what the batch shows besides each layer's own mask: padding, documents.
            cache: keys and values of the positions before; this pass's are written into it.

        Raises:
            ShapeError: ids, positions or a mask that do not fit together.
            OptionError: more tokens than the context, or an id that the vocabulary lacks.
        """
        context = begin(self, ids, position_ids=position_ids, mask=mask, cache=cache)
        return self.decoder(self.embedding(ids, context.positions()), context, cache)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, from the stream after the last norm."""
        return self.unembedding(hidden, self.embedding.tokens.weight)

    def forward(
        self,
        ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """Logits ``batch position vocab``; the arguments are those of ``hidden``."""
        return self.unembed(self.hidden(ids, position_ids=position_ids, mask=mask, cache=cache))
