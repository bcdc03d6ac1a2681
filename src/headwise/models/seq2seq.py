"""The encoder–decoder: a decoder that reads, besides its own past, what an encoder made."""

from __future__ import annotations

from torch import Tensor, nn

from headwise.attention.masks import Mask
from headwise.errors import ShapeError
from headwise.models.architecture import Architecture
from headwise.models.cache import Cache
from headwise.models.context import as_mask
from headwise.models.embedding import TokenEmbedding, Unembedding
from headwise.models.passes import begin
from headwise.models.stack import BlockStack

__all__ = ["EncoderDecoder"]


class EncoderDecoder(nn.Module):
    """One embedding, an encoder, a decoder with cross-attention, an unembedding.

    Vaswani et al. 2017 (arXiv:1706.03762), figure 1.

    Example:
        >>> import torch
        >>> from headwise.models import build, preset
        >>> model = build(preset("tiny-encoder-decoder"))
        >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])).shape
        torch.Size([1, 2, 257])
    """

    def __init__(
        self,
        architecture: Architecture,
        embedding: TokenEmbedding,
        encoder: BlockStack,
        decoder: BlockStack,
        unembedding: Unembedding,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.embedding, self.encoder, self.decoder = embedding, encoder, decoder
        self.unembedding = unembedding
        self.allow_long = False

    def encode(
        self,
        ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Mask | Tensor | None = None,
    ) -> Tensor:
        """What the decoder reads: ``batch key d_model``."""
        context = begin(self, ids, position_ids=position_ids, mask=mask)
        return self.encoder(self.embedding(ids, context.positions()), context)

    def hidden(
        self,
        ids: Tensor,
        source: Tensor,
        *,
        position_ids: Tensor | None = None,
        mask: Mask | Tensor | None = None,
        source_mask: Mask | Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        """The decoder's stream after its last norm: ``batch position d_model``.

        Args:
            ids: the answer's token ids ``batch position``.
            source: what ``encode`` made, ``batch key d_model``.
            position_ids, mask, cache: as of ``Decoder.hidden``. A cache also keeps the source's
                keys and values: it serves one source, that of its first pass.
            source_mask: which positions of the source may be read.
        """
        context = begin(self, ids, position_ids=position_ids, mask=mask, cache=cache)
        context.source = source
        batch, queries = ids.shape
        _check_source(source, batch, self.architecture.d_model)
        context.source_visible = as_mask(source_mask, batch, queries, source.shape[1])
        return self.decoder(self.embedding(ids, context.positions()), context, cache)

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits of the next token, from the decoder's stream after its last norm."""
        return self.unembedding(hidden, self.embedding.tokens.weight)

    def forward(
        self,
        source_ids: Tensor,
        ids: Tensor,
        *,
        source_mask: Mask | Tensor | None = None,
        mask: Mask | Tensor | None = None,
    ) -> Tensor:
        """Logits ``batch position vocab`` of both sequences, start to end."""
        source = self.encode(source_ids, mask=source_mask)
        return self.unembed(self.hidden(ids, source, mask=mask, source_mask=source_mask))


def _check_source(source: Tensor, batch: int, d_model: int) -> None:
    is_tensor = isinstance(source, Tensor)
    fits = is_tensor and source.dim() == 3 and source.is_floating_point()
    if not fits or (source.shape[0], source.shape[2]) != (batch, d_model):
        shape = f"of shape {tuple(source.shape)} and type {source.dtype}" if is_tensor else ""
        raise ShapeError(
            f"a source {shape or f'of type {type(source).__name__}'} for {batch} sequences of ids",
            allowed=f"({batch}, key, {d_model})",
            to_do="give what model.encode(source_ids) returns",
        )
