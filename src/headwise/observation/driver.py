"""How a model is run over documents: what transformers' models and Headwise's own do differently.

The main loop, the text and the gradients ask a ``Driver`` and know nothing of either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headwise.models import Decoder, Encoder, EncoderDecoder, Model

__all__ = ["Document", "Driver", "Kind", "driver", "is_own", "side_by_side"]

Kind = Literal["decoder", "encoder", "encoder-decoder"]
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Document:
    """One piece that the model reads from position 0.

    Shapes: ids (n,) int64, special tokens included; target (m,) int64, what an encoder-decoder's
    decoder is fed, its start token first, or None.
    """

    ids: Tensor
    target: Tensor | None = None

    @property
    def tokens(self) -> int:
        """How many tokens are read, source and target together."""
        return len(self.ids) + (0 if self.target is None else len(self.target))


class Driver(Protocol):
    """A model that can be run."""

    @property
    def vocabulary(self) -> int:
        """How many token ids there are."""

    @property
    def start_token(self) -> int | None:
        """What an encoder-decoder's decoder reads first."""

    @property
    def has_head(self) -> bool:
        """Whether it gives logits over the vocabulary."""

    def run(self, documents: Sequence[Document]) -> None:
        """Read the documents side by side, without logits where that is possible."""

    def predict(self, ids: Tensor, target: Tensor | None) -> tuple[Tensor, Logits]:
        """States ``1 position width`` of one document, and what makes logits of some of them."""


def is_own(model: Any) -> TypeGuard[Model]:
    """Whether it is one of Headwise's own kinds of model."""
    return isinstance(model, Decoder | Encoder | EncoderDecoder)


def driver(model: Any) -> Driver:
    """The driver of a model."""
    if is_own(model):
        from headwise.observation.own_driver import OwnDriver

        return OwnDriver(model)
    from headwise.observation.routed_driver import RoutedDriver

    return RoutedDriver(model)


def side_by_side(
    rows: Sequence[Tensor], device: torch.device, fill: int = 0
) -> tuple[Tensor, Tensor | None]:
    """``batch position`` ids, padded on the right, and which are real; None when all are.

    Example:
        >>> rows = [torch.tensor([5, 6, 7]), torch.tensor([8])]
        >>> ids, real = side_by_side(rows, torch.device("cpu"))
        >>> ids.tolist(), real.tolist()
        ([[5, 6, 7], [8, 0, 0]], [[True, True, True], [True, False, False]])
    """
    ids = pad_sequence(list(rows), batch_first=True, padding_value=fill)
    lengths = torch.tensor([len(row) for row in rows])
    if bool((lengths == ids.shape[1]).all()):
        return ids.to(device), None
    return ids.to(device), (torch.arange(ids.shape[1])[None] < lengths[:, None]).to(device)
