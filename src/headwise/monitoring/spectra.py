"""Spectral norms of W_QK and W_OV of every head, cheaply enough for a training loop.

W_QK = W_Q W_Kᵀ has the singular values of a matrix of d_head rows only: σ² are the eigenvalues of
G_Q G_K, with the Gram matrices G = Wᵀ W. The largest is found by power iteration in float64.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from headwise.circuits.layer_weights import LayerWeights

__all__ = ["spectral_norms"]

_STEPS: Final = 200
_ENOUGH: Final = 1e-10  # relative change of σ² in a step


@torch.no_grad()
def spectral_norms(layer: LayerWeights) -> tuple[Tensor, Tensor]:
    """σ₁ of W_QK and of W_OV, ``head`` float64; of the raw weights, without scale and rotation.

    Example:
        >>> from headwise.circuits.head_weights import head_weights
        >>> from headwise.models import build, preset
        >>> layer = head_weights(build(preset("tiny"))).layers[0]
        >>> qk, ov = spectral_norms(layer)
        >>> torch.allclose(qk, layer.qk().singular_values()[:, 0].double(), rtol=1e-6)
        True
    """
    qk = _largest(_gram(layer.query), layer.shared(_gram(layer.key)))
    # W_V W_O: left factor d × r, right factor r × d, whose Gram matrix is W_O W_Oᵀ.
    right = layer.output.double()
    ov = _largest(layer.shared(_gram(layer.value)), right @ right.mT)
    return qk, ov


def _gram(weight: Tensor) -> Tensor:
    wide = weight.double()
    return wide.mT @ wide


def _largest(left: Tensor, right: Tensor) -> Tensor:
    """The root of the largest eigenvalue of left · right, both positive semidefinite."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(left.shape[-1], 1, generator=generator, dtype=torch.float64).to(left.device)
    x = x.expand(left.shape[0], -1, -1)
    value = torch.zeros(left.shape[0], dtype=torch.float64, device=left.device)
    for _ in range(_STEPS):
        x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-300)
        y = left @ (right @ x)
        new = y.norm(dim=1)[:, 0]
        settled = bool(((new - value).abs() <= _ENOUGH * new).all())
        x, value = y, new
        if settled:
            break
    return _settled(left, right, x, value)


def _settled(left: Tensor, right: Tensor, x: Tensor, value: Tensor) -> Tensor:
    """σ₁ from the last vector: its Rayleigh quotient in the metric of ``right``."""
    top = (x.mT @ (right @ (left @ (right @ x))))[:, 0, 0]
    bottom = (x.mT @ (right @ x))[:, 0, 0]
    quotient = torch.where(bottom > 0, top / bottom.clamp(min=1e-300), value)
    return quotient.clamp(min=0).sqrt()
