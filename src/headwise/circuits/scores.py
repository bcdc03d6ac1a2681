"""Numbers of one head from its product: does it copy, is it a kernel, how many parameters.

A score of signs, for the eigenvalues λ of a square product,

    Re Σλ / Σ|λ|    between −1 and 1;  1: every direction is mapped onto itself, copied

is asked of W_QK (do tokens look for what resembles them) and of the vocabulary circuit
W_E W_OV W_U (does a head make the token it looks at likelier; Elhage et al. 2021, "A Mathematical
Framework for Transformer Circuits", section "Detecting copying"). The latter has vocab² entries;
its non-zero eigenvalues are those of the r×r matrix W_O (W_U W_E) W_V. The d×d matrix W_U W_E
serves all heads and is summed over blocks of the vocabulary, in float64: 8 d² bytes for it (2.7 MB
at d = 576, 134 MB at 4096) and one block.

The null of a score of signs: heads with Gaussian factors of the same shape, read through the same
matrix. Their score is symmetric about 0 (one factor changes its sign), so a z is score / spread.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.circuits.factored import Factored, in_pieces, triangle
from headwise.errors import OptionError, ShapeError

__all__ = [
    "Kernel",
    "kernel",
    "sign_score",
    "sign_spread",
    "vocabulary_map",
]

BLOCK_BYTES = 16 * 2**20
DRAWS = 64


@torch.no_grad()
def vocabulary_map(
    embedding: Tensor,
    unembedding: Tensor,
    *,
    gain: Tensor | None = None,
    centred: bool = False,
    memory: int = BLOCK_BYTES,
) -> Tensor:
    """C · diag(gain) · W_U W_E, ``d_model d_model`` float64: from what a head writes back to reads.

    ``gain`` and ``centred`` fold the final norm into W_U: its gain, and for a LayerNorm the
    centring C = I − 11ᵀ/d. (Its division by the length of the stream is a positive factor for each
    token, which no fixed matrix has; it moves no sign.) Shapes: embedding ``vocab d_model``,
    unembedding ``d_model vocab``, gain ``d_model``. Memory beyond the result: two blocks of the
    vocabulary of at most ``memory`` bytes together.

    Example:
        >>> embedding = torch.eye(5)[:, :3]
        >>> vocabulary_map(embedding, embedding.T).tolist()
        [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]
    """
    if embedding.dim() != 2 or embedding.shape != unembedding.mT.shape:
        raise ShapeError(
            f"an embedding {tuple(embedding.shape)} and an unembedding {tuple(unembedding.shape)}",
            allowed="(vocab, d_model) and (d_model, vocab)",
            to_do="give W_U as the transpose of the weight of the output layer",
        )
    vocab, d = embedding.shape
    total = torch.zeros(d, d, dtype=torch.float64, device=embedding.device)
    step = max(1, memory // (16 * d))
    for i in range(0, vocab, step):
        block = slice(i, i + step)
        total.addmm_(unembedding[:, block].double(), embedding[block].double())
    if gain is not None:
        total *= gain.double()[:, None]
    return total - total.mean(0, keepdim=True) if centred else total


@torch.no_grad()
def sign_score(product: Factored, through: Tensor | None = None) -> Tensor:
    """Re Σλ / Σ|λ| over the eigenvalues of the product W, or of E · W · U with ``through`` = UE.

    Exact through the r×r matrix right · through · left. NaN where all eigenvalues are 0.
    ``through=None`` for W_QK; ``through=vocabulary_map(W_E, W_U)`` and W = W_OV for the copying
    score; W_Eᵀ W_E and W_QK for the same question between tokens.

    Example:
        >>> embedding = torch.randn(29, 7, dtype=torch.float64)
        >>> value = torch.randn(7, 3, dtype=torch.float64)
        >>> copies = Factored(value, value.T)  # writes what it reads
        >>> round(sign_score(copies, vocabulary_map(embedding, embedding.T)).item(), 9)
        1.0
    """
    if through is None:
        values = product.eigenvalues()
    else:
        d, e = product.shape[-2:]
        if through.shape != (e, d):
            raise ShapeError(
                f"a map {tuple(through.shape)} from what a {d}×{e} product writes to what it reads",
                allowed=f"({e}, {d})",
                to_do="take it from vocabulary_map(W_E, W_U)",
            )
        back = through.double()
        small = in_pieces(lambda a, b: b.double() @ back @ a.double(), product.left, product.right)
        identity = torch.eye(product.rank, dtype=small.dtype, device=small.device)
        values = Factored(small, identity).eigenvalues()
    return values.real.sum(-1) / values.abs().sum(-1)


def sign_spread(
    d: int, rank: int, through: Tensor | None = None, *, draws: int = DRAWS, seed: int = 0
) -> float:
    """Root mean square of ``sign_score`` over heads with Gaussian factors d×rank and rank×d.

    Its mean is 0 exactly. The estimate has a relative error of about 1/√(2·draws): 9% at 64.
    Without ``through`` the result is kept for each shape.

    Example:
        >>> 0.1 < sign_spread(64, 8) < 0.3
        True
    """
    if draws < 2:
        raise OptionError(
            f"a spread from {draws} draws", allowed="2 or more", to_do="leave draws out for 64"
        )
    if through is None:
        return _plain_spread(d, rank, draws, seed)
    return _spread(d, rank, through, draws, seed)


@functools.cache
def _plain_spread(d: int, rank: int, draws: int, seed: int) -> float:
    return _spread(d, rank, None, draws, seed)


def _spread(d: int, rank: int, through: Tensor | None, draws: int, seed: int) -> float:
    """One random head after the other: memory of one."""
    generator = torch.Generator().manual_seed(seed)
    total = 0.0
    for _ in range(draws):
        left, right = (
            torch.randn(*shape, generator=generator, dtype=torch.float64)
            for shape in ((d, rank), (rank, d))
        )
        if through is not None:
            left, right = left.to(through.device), right.to(through.device)
        total += sign_score(Factored(left, right), through).item() ** 2
    return (total / draws) ** 0.5


@dataclass(frozen=True, eq=False)
class Kernel:
    """Is exp(x W x'ᵀ) a kernel? Symmetric part S = (W + Wᵀ)/2; values of the batch's shape.

    ``symmetric``: ‖S‖_F² / ‖W‖_F², 1 for a symmetric W, 0 for an antisymmetric one, 1/2 + O(1/d)
    for a random one. ``negative``: Σ|λ⁻| / Σ|λ| over the eigenvalues of S, 0 when it is positive
    semi-definite; its distribution for a random W is symmetric about 1/2. The kernel is symmetric
    where ``symmetric`` = 1, and positive definite where, besides, ``negative`` = 0.
    """

    symmetric: Tensor
    negative: Tensor


@torch.no_grad()
def kernel(product: Factored) -> Kernel:
    """Symmetry and negative mass of a square product, without the d×d matrix.

    ‖S‖² = (‖W‖² + tr W²)/2, and tr W² = tr (right·left)². The eigenvalues of
    S = ½ B J Bᵀ with B = [left, rightᵀ] and J = [[0, I], [I, 0]] are those of the 2r×2r matrix
    ½ R J Rᵀ with B = QR, besides zeros. NaN for a product that is zero.

    Example:
        >>> query = torch.randn(7, 3, dtype=torch.float64)
        >>> same = kernel(Factored(query, query.T))
        >>> round(same.symmetric.item(), 9), round(same.negative.item(), 9)
        (1.0, 0.0)
    """
    squares = in_pieces(_trace_of_square, product.left, product.right)
    norms = product.norm()
    total = norms.square()
    symmetric = (0.5 * (1 + squares / total)).clamp(0.0, 1.0)
    values = in_pieces(_symmetric_values, product.left, product.right.mT)
    size = values.abs().sum(-1)
    negative = (-values).clamp_min(0.0).sum(-1) / size
    nothing = (norms == 0) | ~norms.isfinite()
    return Kernel(symmetric, negative.masked_fill(nothing, torch.nan))


def _trace_of_square(left: Tensor, right: Tensor) -> Tensor:
    small = right.double() @ left.double()
    return (small * small.mT).sum((-2, -1))


def _symmetric_values(left: Tensor, right: Tensor) -> Tensor:
    """Eigenvalues of (left rightᵀ + right leftᵀ)/2 that can differ from 0."""
    both = torch.cat((left, right), -1).double()
    both = both.masked_fill(~both.isfinite().all(-1).all(-1)[..., None, None], 0.0)
    first, second = triangle(both).tensor_split(2, -1)
    half = first @ second.mT
    return torch.linalg.eigvalsh(0.5 * (half + half.mT))
