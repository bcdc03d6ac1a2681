"""Sequences of a text, and a decoder's loss on them, also under a mask of one's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from headwise.attention.masks import Causal, Mask
from headwise.errors import InputError
from headwise.observation.driver import Document, is_own
from headwise.observation.loss import check_has_loss, mean_loss
from headwise.observation.reading import default_text
from headwise.observation.run import opened
from headwise.observation.text import tokenize
from headwise.theorems.statement import NotApplicable
from headwise.theorems.trained import Trained

__all__ = ["check_masked", "embedded", "losses", "sequences"]


def embedded() -> Trained:
    """The small trained model inside the package, with the text that ships with it."""
    return Trained(opened(None, None, None, False))


def sequences(model: Trained, tokens: int, count: int) -> Tensor:
    """``sequence token`` ids: ``count`` pieces of the text, one after the other.

    Raises:
        NotApplicable: the model is no decoder with a loss, or the text is too short.
    """
    loaded = model.loaded
    if loaded.kind != "decoder":
        raise NotApplicable(f"it is about decoders that predict the next token, not {loaded.kind}s")
    text = default_text() if model.text is None else model.text
    try:
        check_has_loss(loaded)
        documents = tokenize(loaded, text, tokens=tokens * count, window=tokens)
    except InputError as error:
        raise NotApplicable(str(error)) from None
    return torch.stack([document.ids for document in documents])


def losses(model: Any, ids: Tensor, mask: Mask) -> Tensor:
    """−ln p of every next token, ``sequence token−1``, float64; ``mask`` says who sees whom.

    Own models take the rule; those of transformers the array ``1 1 query key`` of 0 and the most
    negative number, as their own causal masks are.
    """
    found = []
    with torch.no_grad():
        for row in ids.to(next(model.parameters()).device).split(1):
            logits = model(row, mask=mask) if is_own(model) else _routed(model, row, mask)
            wanted, wide = row[0, 1:], logits[0, :-1].double()
            found.append(torch.nn.functional.cross_entropy(wide, wanted, reduction="none"))
    return torch.stack(found)


def check_masked(model: Trained, ids: Tensor) -> None:
    """Refuse a model whose loss under a causal mask of one's own is not its own loss.

    Both are float32 at worst (half precision: 2⁻⁸ of logits of about 10); another rule is far off.
    """
    try:
        given = float(losses(model.model, ids[:1], Causal()).mean())
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise NotApplicable(f"it takes no mask of one's own ({type(error).__name__})") from None
    if abs(given - mean_loss(model.loaded, [Document(ids[0].cpu())])) > 0.05:
        raise NotApplicable("under a causal mask of one's own it is another model")


def _routed(model: Any, row: Tensor, mask: Mask) -> Tensor:
    keep = mask.dense(0, row.shape[1], row.shape[1]).to(row.device)
    kind = next(model.parameters()).dtype
    added = torch.where(keep, 0.0, torch.finfo(kind).min).to(kind)[None, None]
    options: dict[str, Any] = {}
    if "position_ids" in inspect.signature(model.forward).parameters:
        options["position_ids"] = torch.arange(row.shape[1], device=row.device)[None]
    logits: Tensor = model(input_ids=row, attention_mask=added, use_cache=False, **options).logits
    return logits
