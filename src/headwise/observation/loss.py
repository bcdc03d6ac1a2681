"""The loss of a model on documents: which tokens it predicts, and the mean cross-entropy.

A decoder, and the decoder of an encoder-decoder, predicts each next token; a masked language model
every 7th token, hidden from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from headwise.errors import ModelError, TextError
from headwise.observation.driver import Document
from headwise.observation.evaluating import evaluating
from headwise.observation.loaded import LoadedModel

__all__ = ["LOGITS", "asked", "check_has_loss", "cross_entropy", "mean_loss", "predicted"]

# The largest array of logits held at once, in elements (64 MiB in float32).
LOGITS: Final = 1 << 24

# Of a masked language model, every 7th token is hidden: 14 %, BERT was trained with 15 %.
_HIDE_EVERY: Final = 7
_HIDE_FIRST: Final = 3


def mean_loss(loaded: LoadedModel, documents: Sequence[Document]) -> float:
    """(1/N) Σ_t −ln softmax(logits_t)[token_{t+1}] over all documents, in nats per token.

    Summed in float64; logits are made for a run of tokens at a time.

    Raises:
        ModelError: the model has no language-model head, or no mask token where it needs one.
        TextError: no token to predict.
    """
    check_has_loss(loaded)
    total, count, driver = 0.0, 0, loaded.driver
    run = max(1, LOGITS // driver.vocabulary)
    with torch.no_grad(), evaluating(loaded.model):
        for document in documents:
            if not predicted(loaded, document):
                continue
            ids, at, wanted = asked(loaded, document)
            states, logits = driver.predict(ids, document.target)
            for some, tokens in zip(at.split(run), wanted.split(run), strict=True):
                piece = states[:, some.to(states.device)]
                total += float(cross_entropy(logits(piece)[0], tokens).double())
            count += len(wanted)
    if not count:
        raise TextError("the text has no token to predict", to_do="give two tokens or more")
    return total / count


def check_has_loss(loaded: LoadedModel) -> None:
    """Refuse a model that predicts no tokens."""
    if not loaded.driver.has_head:
        raise ModelError(
            f"{loaded.name} ({type(loaded.model).__name__}) has no language-model head, so it has"
            " no loss"
        )
    if loaded.kind == "encoder" and getattr(loaded.tokenizer, "mask_token_id", None) is None:
        raise ModelError(f"the loss of the encoder {loaded.name} needs a tokenizer with a mask")


def predicted(loaded: LoadedModel, document: Document) -> int:
    """How many tokens of a document are predicted."""
    if loaded.kind == "encoder":
        return int(_hidden(loaded, document.ids).sum())
    read = document.ids if document.target is None else document.target
    return len(read) - 1


def asked(loaded: LoadedModel, document: Document) -> tuple[Tensor, Tensor, Tensor]:
    """The ids that are read, the positions that predict, and the tokens they have to predict."""
    ids = document.ids
    if loaded.kind == "encoder":
        hidden = _hidden(loaded, ids)
        masked = ids.masked_fill(hidden, loaded.tokenizer.mask_token_id)  # type: ignore[union-attr]
        return masked, hidden.nonzero()[:, 0], ids[hidden]
    read = ids if document.target is None else document.target
    return ids, torch.arange(len(read) - 1), read[1:]


def cross_entropy(logits: Tensor, wanted: Tensor) -> Tensor:
    """The sum over tokens, in float32 or better."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, wanted.to(logits.device), reduction="sum")


def _hidden(loaded: LoadedModel, ids: Tensor) -> Tensor:
    """Which tokens a masked language model has to predict: ``(n,)`` bool, special tokens never."""
    chosen = torch.arange(len(ids)) % _HIDE_EVERY == _HIDE_FIRST
    special = torch.tensor(loaded.tokenizer.all_special_ids if loaded.tokenizer else [-1])
    return chosen & ~torch.isin(ids, special)
