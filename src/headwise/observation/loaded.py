"""A model that is ready to be measured, and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from headwise.observation.driver import Driver, Kind, driver

__all__ = ["LoadedModel", "described"]


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in evaluation mode with its tokenizer, and what is known about it."""

    model: Any
    tokenizer: Any | None
    name: str
    architecture: str  # transformers' model_type, or the family of an own model
    context: int | None  # tokens it was trained on at most; None when it does not say
    path: str
    kind: Kind = "decoder"
    position_limit: int | None = None  # rows of a learned position table
    non_finite: tuple[str, ...] = ()  # parameters with NaN or infinity
    notes: tuple[str, ...] = ()

    @property
    def driver(self) -> Driver:
        """How the model is run."""
        return driver(self.model)


def described(model: nn.Module, *, name: str, notes: tuple[str, ...], **facts: Any) -> LoadedModel:
    """The model with what its weights say themselves: whether any of them is not finite."""
    broken = _non_finite(model)
    return LoadedModel(
        model=model,
        name=_printable(name),
        non_finite=broken,
        notes=notes + tuple(f"the weights {each} hold NaN or infinity" for each in broken),
        **facts,
    )


def _printable(name: str) -> str:
    """A name that can be shown: it is the name of a folder, which may hold any character."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in name)


def _non_finite(model: nn.Module) -> tuple[str, ...]:
    broken = []
    for name, parameter in model.named_parameters():
        if parameter.is_meta or not parameter.is_floating_point() or not parameter.numel():
            continue
        low, high = torch.aminmax(parameter.detach())
        if not (torch.isfinite(low) and torch.isfinite(high)):
            broken.append(name)
    return tuple(broken)
