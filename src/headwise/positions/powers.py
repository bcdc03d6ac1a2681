"""The geometric line of frequencies that sinusoidal and rotary positions share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.errors import OptionError

__all__ = ["powers"]


def powers(width: int, base: float, *, of: str, to_do: str) -> Tensor:
    """base^(−2i/width) for every pair, begun pairs included, in float64; ``of`` names the base.

    Example:
        >>> powers(3, 8.0, of="a base of", to_do="give another").tolist()
        [1.0, 0.25]
    """
    if not (math.isfinite(base) and base > 0):
        raise OptionError(f"{of} {base}", allowed="a positive number", to_do=to_do)
    return base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
