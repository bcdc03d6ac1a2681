"""What a remedy does, seen on one batch: the largest logit of every head, and the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import OptionError
from headwise.monitoring.head_sums import HeadSums, sums_of
from headwise.observation.driver import Document
from headwise.observation.evaluating import evaluating
from headwise.observation.loading import wrap_model
from headwise.observation.loss import mean_loss
from headwise.observation.survey import survey
from headwise.observation.tap import Seen, tapped

__all__ = ["Batch", "BeforeAfter", "Look", "look"]

Batch = Tensor | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Look:
    """One batch through a model in evaluation mode.

    Attributes:
        loss: in nats per token; NaN where the model gave none.
        logits: module → the largest attention logit of each head, after scale, softcap, bias and
            mask.
        query_rms, key_rms: module → root mean square of the entries of its queries and keys, as
            attention gets them, padding included.
    """

    loss: float
    logits: dict[str, tuple[float, ...]]
    query_rms: dict[str, float]
    key_rms: dict[str, float]

    @property
    def max_logit(self) -> float:
        """The largest of all heads."""
        return max((x for heads in self.logits.values() for x in heads), default=math.nan)


@dataclass(frozen=True, slots=True)
class BeforeAfter:
    """The same batch before a remedy and after it.

    Example:
        >>> before, after = Look(3.0, {"a": (140.0,)}, {}, {}), Look(2.5, {"a": (100.0,)}, {}, {})
        >>> print(BeforeAfter(before, after))
        largest logit 140 -> 100, loss 3 -> 2.5
    """

    before: Look
    after: Look

    def __str__(self) -> str:
        old, new = self.before, self.after
        said = f"largest logit {old.max_logit:.5g} -> {new.max_logit:.5g}"
        return said if math.isnan(old.loss) else f"{said}, loss {old.loss:.5g} -> {new.loss:.5g}"


@torch.no_grad()
def look(model: nn.Module, batch: Batch) -> Look:
    """Run a batch and look at it; nothing of the model changes.

    Args:
        batch: token ids ``batch position`` (the loss is that of the next token, of a decoder with
            a head), or what the model is called with, by name (the loss is the one it returns).

    Raises:
        OptionError: a tensor that holds no token ids.

    Example:
        >>> from headwise.models import build, preset
        >>> found = look(build(preset("tiny")), torch.arange(12)[None])
        >>> len(found.logits), len(found.logits["decoder.blocks.0.attention.branch"])
        (2, 4)
    """
    sums: dict[str, HeadSums] = {}
    rms: dict[str, list[tuple[float, float]]] = {}

    def tell(seen: Seen) -> None:
        found, path = sums_of(seen, None), seen.path
        if found is not None:
            sums[path] = found.merged(sums[path]) if path in sums else found
        means = [float(x.double().square().mean()) for x in (seen.call.q, seen.call.k)]
        rms.setdefault(path, []).append((means[0], means[1]))

    with evaluating(model), tapped(model, survey(model), tell):
        loss = _run(model, batch)
    query = {path: _root([pair[0] for pair in each]) for path, each in rms.items()}
    key = {path: _root([pair[1] for pair in each]) for path, each in rms.items()}
    return Look(loss, {path: tuple(s.max_logit.tolist()) for path, s in sums.items()}, query, key)


def _root(squares: list[float]) -> float:
    return math.sqrt(sum(squares) / len(squares))


def _run(model: nn.Module, batch: Batch) -> float:
    if isinstance(batch, Mapping):
        loss = getattr(model(**batch), "loss", None)
        return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else math.nan
    if not isinstance(batch, Tensor) or batch.dim() != 2 or batch.is_floating_point():
        raise OptionError(
            f"the batch is {tuple(batch.shape) if isinstance(batch, Tensor) else type(batch)}",
            allowed="token ids (batch, position), or the model's arguments by name",
        )
    loaded = wrap_model(model)
    if loaded.kind == "decoder" and loaded.driver.has_head and batch.shape[1] > 1:
        return mean_loss(loaded, [Document(row.cpu()) for row in batch])
    for row in batch:
        loaded.driver.run([Document(row.cpu())])
    return math.nan
