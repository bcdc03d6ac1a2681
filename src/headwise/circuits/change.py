"""How a product of weights changed: its rank, its energy, and what it amplifies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headwise.circuits.factored import Factored
from headwise.errors import OptionError, ShapeError

__all__ = ["Change", "similarity_null", "subspace_similarity"]

_UNIT = torch.finfo(torch.float64).eps / 2


@dataclass(frozen=True, eq=False)
class Change:
    """ΔW = W' − W of every head, beside W.

    ``noise`` (``head``) bounds what rounding of the stored weights can add to any singular value
    of ΔW: below it nothing is a change.

    Example:
        >>> base = Factored(torch.eye(5)[None, :, :3], torch.eye(5)[None, :3])
        >>> change = Factored(torch.eye(5)[None, :, :2], 0.5 * torch.eye(5)[None, :2])
        >>> found = Change(change, base, noise=torch.zeros(1))
        >>> found.rank().item(), found.energy(1).item(), round(found.amplification(1).item(), 3)
        (2, 0.5, 0.707)
    """

    product: Factored
    base: Factored
    noise: Tensor

    def norm(self) -> Tensor:
        """‖ΔW‖_F, ``head``."""
        return self.product.norm()

    def relative(self) -> Tensor:
        """‖ΔW‖_F / ‖W‖_F, ``head``; infinite where W is 0."""
        return self.norm() / self.base.norm()

    def singular_values(self) -> Tensor:
        """Of ΔW, ``head value``."""
        return self.product.singular_values()

    def rank(self) -> Tensor:
        """How many singular values of ΔW stand above rounding, ``head`` (int64).

        Above both ``noise`` and max(d, e)·u·σ₁ of float64.
        """
        values = self.singular_values()
        floor = max(self.product.shape[-2:]) * _UNIT * values[..., :1]
        counts = (values > torch.maximum(floor, self.noise[..., None].to(values))).sum(-1)
        return counts.masked_fill(values.isnan().any(-1), -1)

    def energy(self, r: int) -> Tensor:
        """Σ_{i ≤ r} σ_i² / ‖ΔW‖_F², ``head``: 1 for r >= rank; NaN where nothing changed."""
        _check_count(r, self.product.values)
        squares = self.singular_values().square()
        return squares[..., :r].sum(-1) / squares.sum(-1)

    def amplification(self, r: int) -> Tensor:
        """‖ΔW‖_F / ‖Uᵀ W V‖_F, ``head``: how far ΔW's own r directions stand above W's use of
        them.

        U, V: the first r singular directions of ΔW. Hu et al. 2021 (arXiv:2106.09685), section
        7.3. NaN where nothing changed, infinite where W does not use the directions at all.
        """
        _check_count(r, self.product.values)
        u, _, v = self.product.svd(r)
        inner = (u.mT @ self.base.left.double()) @ (self.base.right.double() @ v.mT)
        factor = self.norm() / torch.linalg.matrix_norm(inner)
        return factor.masked_fill(self.norm() == 0, torch.nan)


def subspace_similarity(
    first: Factored, second: Factored, *, rank: int, side: Literal["left", "right"] = "left"
) -> Tensor:
    """φ(i, j) = ‖U_iᵀ V_j‖_F² / min(i, j) of two changes, ``… rank rank``: index 0 is i = 1.

    U_i, V_j: the first singular directions of the one and the other, on the ``left`` (what is
    read) or on the ``right``. 1: the smaller space lies in the larger one; 0: orthogonal. NaN
    where a change has fewer directions. Hu et al. 2021 (arXiv:2106.09685), section 7.2.

    Compare with ``similarity_null``, which is for directions that have nothing to do with each
    other. Two changes of W_QK of one model share more: where W_K changed, ΔW_QK reads through
    columns of W_Q, whatever the change was. There compare the changes of W_Q and of W_K
    (``LayerChange.part``); W_OV likewise.

    Example:
        >>> a = Factored(torch.eye(7)[:, :2] * torch.tensor([2.0, 1.0]), torch.eye(7)[:2])
        >>> b = Factored(torch.eye(7)[:, 1:3] * torch.tensor([2.0, 1.0]), torch.eye(7)[:2])
        >>> subspace_similarity(a, b, rank=2).tolist()
        [[0.0, 0.0], [1.0, 0.5]]
    """
    axis = {"left": -2, "right": -1}[side]
    if first.shape[axis] != second.shape[axis]:
        raise ShapeError(
            f"changes of {first.shape[axis]} and {second.shape[axis]} numbers on the {side}",
            allowed="two changes of one model",
        )
    _check_count(rank, min(first.values, second.values))
    u, v = (_directions(product, rank, side) for product in (first, second))
    overlap = (u.mT @ v).square().cumsum(-1).cumsum(-2)
    i = torch.arange(1, rank + 1, dtype=overlap.dtype)
    return overlap / torch.minimum(i[:, None], i[None])


def similarity_null(rank: int, d: int) -> Tensor:
    """E φ(i, j) = max(i, j) / d for random directions of R^d, ``rank rank``.

    E ‖U_iᵀ V_j‖_F² = i·j/d, since each of the i·j squared cosines has the mean 1/d.

    Example:
        >>> similarity_null(2, 8).tolist()
        [[0.125, 0.25], [0.25, 0.25]]
    """
    i = torch.arange(1, rank + 1, dtype=torch.float64)
    return torch.maximum(i[:, None], i[None]) / d


def _directions(product: Factored, rank: int, side: str) -> Tensor:
    """``… d rank``, NaN from the first direction on that the product does not have."""
    u, values, v = product.svd(rank)
    floor = max(product.shape[-2:]) * _UNIT * values[..., :1]
    there = (values > floor)[..., None, :]
    return torch.where(there, u if side == "left" else v.mT, torch.nan)


def _check_count(r: int, most: int) -> None:
    if not 1 <= r <= most:
        raise OptionError(f"the rank is {r}", allowed=f"1 to {most}")
