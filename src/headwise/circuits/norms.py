"""Norms as circuits see them: a fixed linear part, which folds into weights, and a division.

    RMSNorm     norm(x) = (x / ρ) diag(γ)              ρ = √(mean x² + ε)
    LayerNorm   norm(x) = (x C / σ) diag(γ) + β        C = I − 11ᵀ/d, σ = √(mean (x C)² + ε)

The division is by a positive number of each token, so norm(x) W reads the stream through C diag(γ)
W, which does not depend on the token (Elhage et al. 2021, "Handling Layer Normalization"). Likewise
norm(z W), a norm of what is written, writes z (W C diag(γ)) divided by that number, plus β.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

__all__ = ["HeadNorm", "NormFold"]

Kind = Literal["layer", "rms"]


@dataclass(frozen=True, eq=False)
class NormFold:
    """The norm whose output is read. ``gain`` is what multiplies (1 + weight where it is so).

    Example:
        >>> import torch
        >>> norm = NormFold("layer", torch.tensor([2.0, 1.0]), torch.tensor([5.0, 7.0]), eps=0.0)
        >>> norm(torch.tensor([1.0, 3.0])).tolist()
        [3.0, 8.0]
        >>> norm.fold(torch.tensor([[1.0], [1.0]])).tolist()
        [[0.5], [-0.5]]
    """

    kind: Kind
    gain: Tensor | None
    bias: Tensor | None
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """The norm itself: ``… d_model -> … d_model``."""
        y = _standard(x, self.kind, self.eps, (-1,))
        y = y if self.gain is None else y * self.gain.to(y.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def fold(self, weight: Tensor) -> Tensor:
        """C diag(γ) W, for W ``… d_model width``: what reads the stream that is only divided."""
        scaled = weight if self.gain is None else weight * self.gain.to(weight.dtype)[:, None]
        return scaled - scaled.mean(-2, keepdim=True) if self.kind == "layer" else scaled

    def fold_bias(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """b + β W: ``… width``."""
        if self.bias is None:
            return bias
        moved = (self.bias.to(weight.dtype)[:, None] * weight).sum(-2)
        return moved if bias is None else moved + bias

    def fold_output(self, weight: Tensor) -> Tensor:
        """W C diag(γ), for W ``… width d_model``: what is written, only not divided.

        Example:
            >>> import torch
            >>> norm = NormFold("layer", torch.tensor([2.0, 1.0]), None, eps=0.0)
            >>> norm.fold_output(torch.tensor([[1.0, 3.0]])).tolist()
            [[-2.0, 1.0]]
        """
        centred = weight - weight.mean(-1, keepdim=True) if self.kind == "layer" else weight
        return centred if self.gain is None else centred * self.gain.to(weight.dtype)

    def divisor(self, x: Tensor) -> Tensor:
        """ρ or σ of each token, ``… 1``."""
        return _divisor(_centred(x, self.kind, (-1,)), self.eps, (-1,))

    def size(self, x: Tensor) -> Tensor:
        """What rounding is relative to: the largest entry of |x| γ / σ of each token, and |β|."""
        large = x.abs() if self.gain is None else x.abs() * self.gain.abs().to(x.dtype)
        bound = 2 * large.amax(-1, keepdim=True) / self.divisor(x)
        return bound if self.bias is None else bound + self.bias.abs().to(x.dtype)

    def plain(self) -> NormFold:
        """What is left once gain and bias are folded: the centring, if any, and the division."""
        return replace(self, gain=None, bias=None)

    def written(self) -> NormFold:
        """What is left of a norm of what is written once gain and centring are folded.

        The division (by the size before the gain), and the bias, which comes after it.
        """
        return replace(self, kind="rms", gain=None)


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A norm of queries or keys: of each head, or ``across`` all heads of a token at once.

    ``gain`` and ``bias`` are ``head d_head`` (one row for all heads, where they share it).
    """

    kind: Kind
    gain: Tensor | None
    bias: Tensor | None
    eps: float
    across: bool

    def __call__(self, x: Tensor) -> Tensor:
        """``batch head position d_head``, same out."""
        y = _standard(x, self.kind, self.eps, (-3, -1) if self.across else (-1,))
        y = y if self.gain is None else y * self.gain[:, None].to(y.dtype)
        return y if self.bias is None else y + self.bias[:, None].to(y.dtype)

    def fold(self, weight: Tensor) -> Tensor:
        """W C diag(γ), for W ``head d_model d_head`` (or biases ``head d_head``)."""
        if self.kind == "layer":
            axes = (0, -1) if self.across else (-1,)
            weight = weight - weight.mean(axes, keepdim=True)
        if self.gain is None:
            return weight
        gain = self.gain.to(weight.dtype)
        return weight * (gain[:, None] if weight.dim() == 3 else gain)

    def plain(self) -> HeadNorm:
        """What is left once gain and centring are folded: the division, and the bias."""
        return replace(self, kind="rms", gain=None)


def _standard(x: Tensor, kind: Kind, eps: float, axes: tuple[int, ...]) -> Tensor:
    centred = _centred(x, kind, axes)
    return centred / _divisor(centred, eps, axes)


def _centred(x: Tensor, kind: Kind, axes: tuple[int, ...]) -> Tensor:
    return x - x.mean(axes, keepdim=True) if kind == "layer" else x


def _divisor(centred: Tensor, eps: float, axes: tuple[int, ...]) -> Tensor:
    return (centred.square().mean(axes, keepdim=True) + eps).sqrt()
