"""Small decoders trained on tokens that repeat, and what their heads then do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from headwise.circuits.behaviour import HeadLabels
from headwise.circuits.labels import repeated_labels
from headwise.models.build import build
from headwise.models.presets import decoder_sizes

__all__ = ["SHORTEST", "Trial", "best_head", "repeats", "trial"]

_VOCAB: Final = 32
_LENGTH: Final = 48
_BATCH: Final = 32
_PEAK: Final = 6e-3
SHORTEST: Final = 8  # periods are 8 to 16


@dataclass(frozen=True, slots=True)
class Trial:
    """What a trained model does on fresh sequences with varying periods.

    Attributes:
        accuracy: share of the tokens from the second copy on that it predicts.
        previous, induction: largest mean weight, by layer, on the token before, and on the token
            after the last copy.
    """

    accuracy: float
    previous: tuple[float, ...]
    induction: tuple[float, ...]


def repeats(
    generator: torch.Generator, sequences: int, period: int | None = None
) -> tuple[Tensor, Tensor]:
    """Random tokens repeated with a period of 8 to 16 (or always ``period``), and what repeats.

    Both ``sequence position``; a position is known from the second copy on.
    """
    rows, known = [], []
    places = torch.arange(_LENGTH)
    for _ in range(sequences):
        drawn = int(torch.randint(SHORTEST, 2 * SHORTEST + 1, (), generator=generator))
        p = drawn if period is None else period
        rows.append(torch.randint(_VOCAB, (p,), generator=generator)[places % p])
        known.append(places >= p)
    return torch.stack(rows), torch.stack(known)


def trial(layers: int, steps: int, seed: int, *, period: int | None = None) -> Trial:
    """Train a decoder of so many layers to predict the repeated tokens, and look at it.

    ``period`` fixes the period of the text that it learns from, and is tested on.
    """
    sizes = decoder_sizes(vocab=_VOCAB, d_model=64, layers=layers, heads=4, d_ff=16,
                          context=2 * _LENGTH, base=100.0, tied=False)  # fmt: skip
    model: Any = build(sizes, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.98), weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        loss, _ = _loss(model, *repeats(generator, _BATCH, period))
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = _PEAK * min(1.0, (step + 1) / 20)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        _, accuracy = _loss(model, *repeats(generator, 4 * _BATCH, period))
    labels = repeated_labels(model, period=13, copies=3)
    return Trial(accuracy, best_head(labels, "previous_token"), best_head(labels, "induction"))


def _loss(model: Any, ids: Tensor, known: Tensor) -> tuple[Tensor, float]:
    logits, targets, counted = model(ids)[:, :-1], ids[:, 1:], known[:, 1:]
    right = (logits.argmax(-1) == targets)[counted].float().mean()
    return functional.cross_entropy(logits[counted], targets[counted]), float(right)


def best_head(labels: HeadLabels, name: str) -> tuple[float, ...]:
    """The largest score of every layer that has one."""
    return tuple(float(layer.scores[name].max()) for layer in labels.layers)
