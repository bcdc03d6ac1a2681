"""Feature maps: non-negative φ with which attention's kernel becomes a product κ(q, k) = φ(q)·φ(k).

A feature map is any callable ``... d_head -> ... feature`` with entries ≥ 0 that treats every
vector by itself. Results are float32, or float64 for float64: half precision has too few digits for
sums of exponentials.

    elu_plus_one              its own kernel, no approximation of the softmax; feature = d_head
    PositiveRandomFeatures    E[φ(q)·φ(k)] = exp(scale · q·k), the kernel of the softmax

Katharopoulos et al. 2020 (arXiv:2006.16236), section 3.2; Choromanski et al. 2020
(arXiv:2009.14794), sections 2.3 and 2.4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError

__all__ = ["FeatureMap", "PositiveRandomFeatures", "elu_plus_one"]

FeatureMap = Callable[[Tensor], Tensor]


def elu_plus_one(x: Tensor) -> Tensor:
    """elu(x) + 1, entry by entry: e^x below zero and x + 1 from there on.

    Computed as e^min(x, 0) + max(x, 0): elu(x) + 1 taken literally is (e^x − 1) + 1, which rounds
    to 0 for very negative x and would leave a denominator of 0. Katharopoulos et al. 2020
    (arXiv:2006.16236), section 3.2.

    Example:
        >>> elu_plus_one(torch.tensor([0.0, 2.0])), elu_plus_one(torch.tensor([-8.0])).log()
        (tensor([1., 3.]), tensor([-8.]))
    """
    x = x.to(_arithmetic(x.dtype))
    return torch.exp(x.clamp(max=0)) + x.relu()


@dataclass(frozen=True, eq=False)
class PositiveRandomFeatures:
    """FAVOR+: φ(x)_f = m^(-1/2) · exp(w_f·x' − |x'|²/2), with x' = √scale · x and m random w_f.

    Every w_f is standard normal, so E[φ(x)·φ(y)] = exp(scale · x·y) exactly. With independent w_f
    the variance is exp(2 scale · x·y) · (exp(|x' + y'|²) − 1) / m: it explodes for long vectors,
    and then no affordable m helps. With orthogonal w_f it is smaller at the same m. Choromanski et
    al. 2020 (arXiv:2009.14794), lemmas 1 and 2, theorem 2.

    ``projection`` has shape ``feature d_head``; ``scale`` is that of the logits, d_head^(-1/2) when
    None. Make one with ``iid`` or ``orthogonal``, or from a projection of your own.

    Example:
        >>> from headwise.attention import PositiveRandomFeatures
        >>> generator = torch.Generator().manual_seed(7)
        >>> phi = PositiveRandomFeatures.orthogonal(4, 4096, generator=generator)
        >>> x, y = torch.tensor([0.5, 0.0, -0.5, 0.5]), torch.tensor([0.5, 0.5, 0.0, 0.5])
        >>> ratio = (phi(x) @ phi(y)) / (x @ y / 2).exp()  # scale 4^(-1/2)
        >>> bool((ratio - 1).abs() < 0.1)
        True
    """

    projection: Tensor
    scale: float | None = None

    def __post_init__(self) -> None:
        shape = tuple(self.projection.shape)
        if len(shape) != 2 or 0 in shape:
            raise ShapeError(f"a projection of shape {shape}", allowed="feature d_head, both >= 1")
        if self.scale is not None and not 0 < self.scale < math.inf:
            raise OptionError(f"scale is {self.scale}", allowed="above 0 and finite, or None")

    @classmethod
    def iid(
        cls, d_head: int, features: int, *, generator: torch.Generator, scale: float | None = None
    ) -> PositiveRandomFeatures:
        """Independent standard normal w_f, drawn from ``generator`` alone."""
        _check_sizes(d_head, features)
        return cls(_normal(features, d_head, generator), scale)

    @classmethod
    def orthogonal(
        cls, d_head: int, features: int, *, generator: torch.Generator, scale: float | None = None
    ) -> PositiveRandomFeatures:
        """Standard normal w_f that are orthogonal within each block of ``d_head`` features.

        A uniformly random orthogonal matrix gives the directions, independent normal vectors give
        the lengths: each w_f alone is standard normal, so the kernel stays unbiased.
        """
        _check_sizes(d_head, features)
        blocks = [_rotation(d_head, generator) for _ in range(-(-features // d_head))]
        lengths = _normal(features, d_head, generator).norm(dim=1, keepdim=True)
        return cls(torch.cat(blocks)[:features] * lengths, scale)

    def __call__(self, x: Tensor) -> Tensor:
        """φ of every vector: ``... d_head -> ... feature``."""
        features, d_head = self.projection.shape
        if not x.dim() or x.shape[-1] != d_head:
            raise ShapeError(
                f"vectors of shape {tuple(x.shape)} for a projection of width {d_head}",
                allowed=f"a last axis of {d_head}",
            )
        scale = d_head**-0.5 if self.scale is None else self.scale
        x = x.to(_arithmetic(x.dtype)) * math.sqrt(scale)
        exponent = x @ self.projection.to(x).T - x.square().sum(-1, keepdim=True) / 2
        return torch.exp(exponent - math.log(features) / 2)


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_sizes(d_head: int, features: int) -> None:
    if d_head < 1 or features < 1:
        raise OptionError(
            f"{features} random features of width {d_head}", allowed="both at least 1"
        )


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(
        rows, columns, generator=generator, device=generator.device, dtype=torch.float64
    )


def _rotation(size: int, generator: torch.Generator) -> Tensor:
    """A uniformly random orthogonal matrix: QR with the signs of R moved into Q."""
    q, r = torch.linalg.qr(_normal(size, size, generator))
    return q * r.diagonal().sign()
