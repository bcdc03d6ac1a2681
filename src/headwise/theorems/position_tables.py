"""The vectors that a model adds for positions, and whether a shift of them is a linear map."""

from __future__ import annotations

import re
from typing import Any, Final

import torch
from torch import Tensor, nn

from headwise.models.embedding import SinusoidalPositions
from headwise.positions import LearnedPositions
from headwise.theorems.statement import NotApplicable

__all__ = ["extrapolated", "has_position_table", "position_table"]

_NAMES: Final = re.compile(r"(position_embeddings?|embed_positions?|wpe|pos_emb\w*)$")
_ROWS: Final = 512  # of a formula without an end
_SHARE: Final = 4  # fitted positions for each direction that is fitted


def position_table(model: Any) -> tuple[Tensor, bool]:
    """The position vectors, ``position width``, float64, and whether they are stored as weights.

    Raises:
        NotApplicable: the model adds none.
    """
    for name, module in model.named_modules():
        if isinstance(module, SinusoidalPositions):
            return module(torch.arange(_ROWS)).double(), False
        if isinstance(module, LearnedPositions) or (
            isinstance(module, nn.Embedding) and _NAMES.search(name)
        ):
            return module.weight.detach().double().cpu(), True
    raise NotApplicable("it adds no vectors for positions")


def has_position_table(model: Any) -> bool:
    """Whether the model adds a vector for each position."""
    try:
        position_table(model)
    except NotApplicable:
        return False
    return True


def extrapolated(table: Tensor, step: int, fitted: int) -> float:
    """Relative error beyond row ``fitted`` of the linear shift by ``step`` fitted up to it.

    Where the table is wide, the map is fitted on its leading directions, with several positions
    for each: any table fits a map with as many numbers as it has itself.

    Example:
        >>> turns = torch.arange(60, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3])
        >>> extrapolated(torch.cat((turns.sin(), turns.cos()), 1), 2, 40) < 1e-12
        True
    """
    directions = min(table.shape[1], fitted // _SHARE)
    if directions < table.shape[1]:
        _, _, leading = torch.linalg.svd(table[:fitted], full_matrices=False)
        table = table @ leading[:directions].T
    before, after = table[: fitted - step], table[step:fitted]
    shift = torch.linalg.pinv(before, rtol=1e-13) @ after
    missed = table[fitted - step : -step] @ shift - table[fitted:]
    return float(missed.norm() / table[fitted:].norm())
