"""Queries and keys with a known law, and the logits that the definition makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from headwise.attention.definition import scores

__all__ = [
    "FOURTH",
    "Draw",
    "aligned",
    "gaussian",
    "logits",
    "normal",
    "shared_factor",
    "shifted",
    "uniform",
]

Draw = Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]

# E x⁴ of one coordinate with mean 0 and variance 1.
FOURTH: Final = {"normal": 3.0, "uniform": 9 / 5}


def gaussian(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64, drawn in float32: that takes a fifth of the time.

    Example:
        >>> gaussian(torch.Generator().manual_seed(0), 2, 3).shape
        torch.Size([2, 3])
    """
    return torch.randn(shape, generator=generator).double()


def normal(generator: torch.Generator, pairs: int, d: int) -> tuple[Tensor, Tensor]:
    """Independent q and k, ``pair d_head``, of independent standard normal coordinates."""
    return gaussian(generator, pairs, d), gaussian(generator, pairs, d)


def uniform(generator: torch.Generator, pairs: int, d: int) -> tuple[Tensor, Tensor]:
    """The same with coordinates uniform on ±√3: mean 0, variance 1."""
    q, k = torch.rand(2, pairs, d, generator=generator, dtype=torch.float64)
    return math.sqrt(12) * (q - 0.5), math.sqrt(12) * (k - 0.5)


def shifted(mean: float) -> Draw:
    """Standard normal coordinates with a mean that is not zero."""

    def draw(generator: torch.Generator, pairs: int, d: int) -> tuple[Tensor, Tensor]:
        q, k = normal(generator, pairs, d)
        return q + mean, k + mean

    return draw


def aligned(rho: float) -> Draw:
    """Every coordinate of k has correlation ``rho`` with the same coordinate of q."""

    def draw(generator: torch.Generator, pairs: int, d: int) -> tuple[Tensor, Tensor]:
        q, k = normal(generator, pairs, d)
        return q, rho * q + math.sqrt(1 - rho**2) * k

    return draw


def shared_factor(c: float, c_keys: float | None = None) -> Draw:
    """The coordinates of q have correlation ``c`` with each other; those of k ``c_keys`` (or c)."""

    def draw(generator: torch.Generator, pairs: int, d: int) -> tuple[Tensor, Tensor]:
        q, k = normal(generator, pairs, d)
        common = gaussian(generator, 2, pairs, 1)
        other = c if c_keys is None else c_keys
        return (
            math.sqrt(1 - c) * q + math.sqrt(c) * common[0],
            math.sqrt(1 - other) * k + math.sqrt(other) * common[1],
        )

    return draw


def logits(q: Tensor, k: Tensor, scale: float | None = 1.0) -> Tensor:
    """The logit of every pair: one query and one key each, as the definition of attention has it.

    Shapes: q and k ``pair d_head`` -> ``pair``. ``scale`` None: that of the definition.
    """
    return scores(q[:, None, None], k[:, None, None], scale=scale)[:, 0, 0, 0]
