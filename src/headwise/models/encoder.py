"""The encoder: every position reads the whole sequence."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.attention.masks import Mask
from headwise.errors import ModelError
from headwise.models.architecture import Architecture
from headwise.models.embedding import Pooler, TokenEmbedding, Unembedding
from headwise.models.passes import begin
from headwise.models.stack import BlockStack

__all__ = ["Encoder"]


class Encoder(nn.Module):
    """Embedding, blocks that see both ways, and a head if the model has one.

    Example:
        >>> import torch
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny-encoder"))
        >>> model.hidden(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 32])
    """

    def __init__(
        self,
        architecture: Architecture,
        embedding: TokenEmbedding,
        encoder: BlockStack,
        unembedding: Unembedding | None = None,
        pooler: Pooler | None = None,
        classifier: nn.Linear | None = None,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.embedding, self.encoder = embedding, encoder
        self.unembedding, self.pooler, self.classifier = unembedding, pooler, classifier
        self.allow_long = False

    def hidden(
        self,
        ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """The stream after the last block: ``batch position d_model``."""
        context = begin(self, ids, position_ids=position_ids, mask=mask)
        x = self.embedding(ids, context.positions(), segment_ids)
        return self.encoder(x, context)

    def pooled(self, hidden: Tensor) -> Tensor:
        """One vector for the sequence, from its first position: ``batch d_model``."""
        if self.pooler is None:
            raise ModelError(
                "this encoder has no pooler", to_do="average the positions of hidden(…) instead"
            )
        return self.pooler(hidden)

    def classify(self, hidden: Tensor) -> Tensor:
        """Logits of the classes of the sequence, from ``pooled``: ``batch class``."""
        if self.classifier is None:
            raise ModelError(
                "this encoder has no classes", to_do="train a head on hidden(…) or pooled(…)"
            )
        return self.classifier(self.pooled(hidden))

    def forward(
        self,
        ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        """Logits of the hidden tokens ``batch position vocab``; without a head, ``hidden``."""
        x = self.hidden(ids, position_ids=position_ids, mask=mask, segment_ids=segment_ids)
        if self.unembedding is None:
            return x
        return self.unembedding(x, self.embedding.tokens.weight)
