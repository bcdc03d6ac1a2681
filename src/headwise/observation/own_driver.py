"""Headwise's own models, run over documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from headwise.models import Decoder, Encoder, EncoderDecoder, Model
from headwise.observation.driver import Document, side_by_side

__all__ = ["OwnDriver"]


class OwnDriver:
    """A decoder, encoder or encoder-decoder of ``headwise.models``."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def vocabulary(self) -> int:
        return self.model.architecture.vocab

    @property
    def start_token(self) -> int | None:
        return self.model.architecture.start_token

    @property
    def has_head(self) -> bool:
        return self.model.unembedding is not None

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.model.embedding.tokens.weight.device
        return device

    def run(self, documents: Sequence[Document]) -> None:
        """Read the documents side by side, up to the last hidden states."""
        model = self.model
        ids, real = side_by_side([document.ids for document in documents], self._device)
        with self._any_length():
            if not isinstance(model, EncoderDecoder):
                model.hidden(ids, mask=real)
                return
            targets = [d.target for d in documents if d.target is not None]
            target, shown = side_by_side(targets, self._device)
            source = model.encode(ids, mask=real)
            model.hidden(target, source, mask=shown, source_mask=real)

    def predict(
        self, ids: Tensor, target: Tensor | None
    ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """The last hidden states, and the unembedding."""
        model, row = self.model, ids[None].to(self._device)
        with self._any_length():
            if isinstance(model, EncoderDecoder):
                assert target is not None
                states = model.hidden(target[None].to(self._device), model.encode(row))
            else:
                states = model.hidden(row)
        if isinstance(model, Decoder | EncoderDecoder):
            return states, model.unembed
        return states, lambda piece: self._masked(model, piece)

    @staticmethod
    def _masked(model: Encoder, piece: Tensor) -> Tensor:
        assert model.unembedding is not None
        logits: Tensor = model.unembedding(piece, model.embedding.tokens.weight)
        return logits

    @contextmanager
    def _any_length(self) -> Iterator[None]:
        """Lengths, and --allow-long, were checked when the text was cut into documents."""
        before = self.model.allow_long
        self.model.allow_long = True
        try:
            yield
        finally:
            self.model.allow_long = before
