"""A product kept as its two thin factors: W = left · right, never multiplied out.

    left d×r,  right r×e,  r small        W_QK = W_Q W_Kᵀ,  W_OV = W_V W_O

With left = Q₁R₁ and rightᵀ = Q₂R₂ the product is Q₁ (R₁R₂ᵀ) Q₂ᵀ: its singular values and its norm
are those of the r×r core R₁R₂ᵀ. The non-zero eigenvalues of left · right are those of the r×r
matrix right · left, and so is the trace. **Norms and singular values are not**: a Frobenius norm
does not survive a cyclic exchange of factors. Everything is decided in float64.

Only R is needed for the values, and R is also the Cholesky factor of the Gram matrix AᵀA, five
times sooner than by reflections. That loses precision with the condition κ of A: the R found is
exact for a matrix A + dA, ‖dA‖ <= c·u·κ·‖A‖. κ is bounded by ‖R‖_F ‖R⁻¹‖_F, and where the bound is
above 10⁴ (a loss of at most 10⁻¹² of the largest value), reflections are used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError

__all__ = ["Factored", "Triplets", "in_pieces", "triangle"]

MOST_CONDITION = 1e4
DOUBT = 1e-6
PIECE_BYTES = 32 * 2**20
UNIT = torch.finfo(torch.float64).eps / 2


class Triplets(NamedTuple):
    """Singular values, largest first, and vectors: ``… d k``, ``… k`` and ``… k e``."""

    left: Tensor
    values: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class Factored:
    """left · right for every member of a batch (layers, heads), kept as ``… d r`` and ``… r e``.

    Batch axes broadcast without a copy. Results are float64; a member with a NaN or an infinity in
    it gives NaN, and leaves the others alone.

    Example:
        >>> query, key = torch.randn(9, 8, 576, 64), torch.randn(9, 8, 576, 64)
        >>> product = Factored(query, key.mT)
        >>> product.shape, product.rank, product.singular_values().shape
        (torch.Size([9, 8, 576, 576]), 64, torch.Size([9, 8, 64]))
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        left, right = self.left, self.right
        fits = left.dim() >= 2 and right.dim() >= 2 and left.shape[-1] == right.shape[-2]
        if not (fits and left.is_floating_point() and right.is_floating_point()):
            raise ShapeError(
                f"factors of shapes {tuple(left.shape)} ({left.dtype}) and"
                f" {tuple(right.shape)} ({right.dtype})",
                allowed="real left (…, d, r) and right (…, r, e)",
                to_do="transpose the factor that stands the other way",
            )
        try:
            batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        except RuntimeError:
            raise ShapeError(
                f"batch axes {tuple(left.shape[:-2])} and {tuple(right.shape[:-2])} of a product",
                allowed="equal axes, or axes of size 1",
                to_do="repeat the factor that several heads share",
            ) from None
        object.__setattr__(self, "left", left.detach().expand(*batch, *left.shape[-2:]))
        object.__setattr__(self, "right", right.detach().expand(*batch, *right.shape[-2:]))

    # -- what it is ---------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """The shape that the product would have: ``… d e``."""
        return torch.Size((*self.left.shape[:-1], self.right.shape[-1]))

    @property
    def batch(self) -> torch.Size:
        """The axes before the matrix: layers, heads."""
        return self.left.shape[:-2]

    @property
    def rank(self) -> int:
        """r, the width of the factors: the rank is at most this."""
        return self.left.shape[-1]

    @property
    def values(self) -> int:
        """min(d, r, e): how many singular values can differ from 0."""
        return min(*self.shape[-2:], self.rank)

    @property
    def T(self) -> Factored:
        """The transpose, rightᵀ · leftᵀ.

        Example:
            >>> Factored(torch.ones(3, 1), torch.ones(1, 2)).T.shape
            torch.Size([2, 3])
        """
        return Factored(self.right.mT, self.left.mT)

    def parameters(self) -> int:
        """r (d + e − r): the free numbers of a d×e matrix of rank r, d·r + r·e less the gauge r².

        Example:
            >>> Factored(torch.ones(576, 64), torch.ones(64, 576)).parameters()
            69632
        """
        d, e = self.shape[-2:]
        r = self.values
        return r * (d + e - r)

    def dense(self) -> Tensor:
        """The product multiplied out in float64, ``… d e``: for tests and small shapes.

        Example:
            >>> Factored(torch.ones(2, 3), torch.ones(3, 2)).dense().tolist()
            [[3.0, 3.0], [3.0, 3.0]]
        """
        return self.left.double() @ self.right.double()

    # -- algebra ------------------------------------------------------------------------------

    def __getitem__(self, index: object) -> Factored:
        """Members of the batch; the two axes of the matrix are not indexed."""
        places = index if isinstance(index, tuple) else (index,)
        used = sum(place is not None and place is not Ellipsis for place in places)
        if used > len(self.batch):
            raise ShapeError(
                f"{used} indices into a product with {len(self.batch)} batch axes",
                allowed=f"at most {len(self.batch)}",
                to_do="index layers and heads only; the product has no entries to take out",
            )
        whole = (*places, slice(None), slice(None))
        return Factored(self.left[whole], self.right[whole])

    def __matmul__(self, other: Factored | Tensor) -> Factored:
        """self · other, with the smaller of the two ranks.

        Example:
            >>> a = Factored(torch.ones(5, 1), torch.ones(1, 7))
            >>> b = Factored(torch.ones(7, 2), torch.ones(2, 5))
            >>> (a @ b).rank, (a @ torch.ones(7, 3)).shape
            (1, torch.Size([5, 3]))
        """
        if isinstance(other, Tensor):
            self._meets(self.shape[-1], other.shape[-2] if other.dim() > 1 else 0)
            return Factored(self.left, self.right.double() @ other.double())
        self._meets(self.shape[-1], other.shape[-2])
        middle = self.right.double() @ other.left.double()
        if self.rank <= other.rank:
            return Factored(self.left, middle @ other.right.double())
        return Factored(self.left.double() @ middle, other.right)

    def __rmatmul__(self, other: Tensor) -> Factored:
        """other · self for a matrix or a batch of matrices."""
        self._meets(other.shape[-1], self.shape[-2])
        return Factored(other.double() @ self.left.double(), self.right)

    # -- values -------------------------------------------------------------------------------

    def core(self) -> Tensor:
        """R₁R₂ᵀ, ``… r r`` (smaller when d or e is): the singular values and norm of the product.

        Members that hold a NaN or an infinity are NaN throughout.
        """
        return in_pieces(_core, self.left, self.right.mT)

    def norm(self) -> Tensor:
        """‖W‖_F, of the batch's shape.

        Example:
            >>> Factored(torch.ones(3, 2), torch.ones(2, 5)).norm().item() ** 2  # 15 entries of 2
            60.0...
        """
        return torch.linalg.matrix_norm(self.core())

    def trace(self) -> Tensor:
        """Σ_i W_ii = Σ left ∘ rightᵀ."""
        self._square("trace")
        return in_pieces(
            lambda a, b: (a.double() * b.double()).sum((-2, -1)), self.left, self.right.mT
        )

    def singular_values(self) -> Tensor:
        """σ₁ >= σ₂ >= …, ``… min(d, r, e)``: all that can differ from 0.

        Each has an error of at most a few u·‖left‖·‖right‖ (10⁻¹² of it where Cholesky is used).

        Example:
            >>> left = torch.tensor([[3.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
            >>> [round(x, 9) for x in Factored(left, left.T).singular_values().tolist()]
            [9.0, 4.0]
        """
        return _checked(torch.linalg.svdvals, self.core())

    def eigenvalues(self) -> Tensor:
        """The r eigenvalues of right · left (complex, no order): those of W, besides zeros.

        Example:
            >>> turn = torch.tensor([[0.0, -1.0], [1.0, 0.0]])
            >>> sorted(Factored(turn, torch.eye(2)).eigenvalues().imag.tolist())
            [-1.0, 1.0]
        """
        self._square("eigenvalues")
        small = in_pieces(lambda a, b: b.double() @ a.double(), self.left, self.right)
        return _checked(torch.linalg.eigvals, small)

    def svd(self, k: int | None = None) -> Triplets:
        """The k largest singular values with their directions; None: all min(d, r, e).

        W = Σ_i σ_i u_i v_iᵀ: ``left`` has the u_i as columns, ``right`` the v_i as rows; cut at k
        it is the nearest product of rank k (Eckart and Young).

        Example:
            >>> u, s, v = Factored(torch.randn(7, 3), torch.randn(3, 5)).svd(k=2)
            >>> u.shape, s.shape, v.shape
            (torch.Size([7, 2]), torch.Size([2]), torch.Size([2, 5]))
        """
        k = self.values if k is None else k
        if not 1 <= k <= self.values:
            raise OptionError(
                f"{k} singular directions of a product of rank {self.rank}",
                allowed=f"1 to {self.values}",
                to_do="leave k out for all of them",
            )
        parts = in_pieces(lambda a, b: _triplets(a, b, k), self.left, self.right.mT)
        d = self.shape[-2]
        return Triplets(parts[..., :d, :], parts[..., d, :], parts[..., d + 1 :, :].mT)

    # -- ranks --------------------------------------------------------------------------------

    def effective_rank(self) -> Tensor:
        """exp(−Σ p ln p) with p = σ / Σσ, between 1 and r; 0 for a product that is zero.

        Roy and Vetterli 2007, "The effective rank", section 2.

        Example:
            >>> round(Factored(torch.eye(5), torch.eye(5)).effective_rank().item(), 9)
            5.0
        """
        return effective_rank(self.singular_values())

    def stable_rank(self) -> Tensor:
        """‖W‖_F² / σ₁², between 1 and r; 0 for a product that is zero.

        Example:
            >>> left = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
            >>> round(Factored(left, torch.eye(2)).stable_rank().item(), 9)
            1.25
        """
        return stable_rank(self.singular_values())

    def numerical_rank(self, unit: float = UNIT) -> Tensor:
        """How many σ exceed max(d, e) · u · σ₁ (int64); −1 for a member that is not finite.

        ``unit`` is the rounding u of the arithmetic that the weights come from: float64 unless
        said; 2⁻²⁴ asks for the rank that float32 weights can tell from 0.

        Example:
            >>> Factored(torch.ones(7, 3), torch.ones(3, 5)).numerical_rank().item()
            1
        """
        values = self.singular_values()
        doubt = values[..., -1] <= DOUBT * values[..., 0]
        if doubt.any():  # by reflections: a σ of 0 has to come out below the threshold
            sure = in_pieces(lambda a, b: _core(a, b, 0.0), self.left[doubt], self.right.mT[doubt])
            values[doubt] = torch.linalg.svdvals(sure)
        least = max(self.shape[-2:]) * unit * values[..., :1]
        counts = (values > least).sum(-1)
        return counts.masked_fill(values.isnan().any(-1), -1)

    def _square(self, what: str) -> None:
        d, e = self.shape[-2:]
        if d != e:
            raise ShapeError(
                f"{what} of a {d}×{e} product",
                allowed="a square product",
                to_do="multiply it with what brings it back to the space it reads",
            )

    @staticmethod
    def _meets(inner: int, outer: int) -> None:
        if inner != outer:
            raise ShapeError(
                f"a product of widths {inner} and {outer}",
                allowed="equal widths where two matrices meet",
                to_do="check the order of the two, or transpose one",
            )


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of σ / Σσ, over the last axis."""
    share = values / values.sum(-1, keepdim=True)
    rank = torch.special.entr(share).sum(-1).exp()
    return rank.masked_fill((values == 0).all(-1), 0.0)


def stable_rank(values: Tensor) -> Tensor:
    """Σσ² / σ₁², over the last axis (largest first)."""
    rank = (values / values[..., :1]).square().sum(-1)
    return rank.masked_fill((values == 0).all(-1), 0.0)


def triangle(x: Tensor, most_condition: float = MOST_CONDITION) -> Tensor:
    """R of x = QR in float64, ``… r r``; x itself where it has no more rows than columns.

    By Cholesky where the condition allows it, by reflections elsewhere (top of this file).
    """
    x = x.double()
    if x.shape[-2] <= x.shape[-1]:
        return x
    lower, failed = torch.linalg.cholesky_ex(x.mT @ x)
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device).expand_as(lower)
    inverse = torch.linalg.solve_triangular(lower, identity, upper=False)
    condition = torch.linalg.matrix_norm(lower) * torch.linalg.matrix_norm(inverse)
    poor = (failed != 0) | ~(condition <= most_condition)
    upper = lower.mT
    if poor.any():
        upper = upper.contiguous()
        upper[poor] = torch.linalg.qr(x[poor], mode="r").R
    return upper


def in_pieces(function: Callable[..., Tensor], *tensors: Tensor, most: int = PIECE_BYTES) -> Tensor:
    """``function`` of tensors ``batch … row column``, a few members at a time, put together again.

    A piece of the first tensors takes at most ``most`` bytes in float64, unless one member does.
    """
    batch = tensors[0].shape[:-2]
    size = 8 * sum(x.numel() for x in tensors)
    if size <= most or not batch or batch.numel() <= 1:
        return function(*tensors)
    if batch[0] == 1:
        return in_pieces(function, *(x[0] for x in tensors), most=most)[None]
    step = max(1, most * batch[0] // size)
    pieces: Iterable[int] = range(0, batch[0], step)
    return torch.cat(
        [in_pieces(function, *(x[i : i + step] for x in tensors), most=most) for i in pieces]
    )


def _core(left: Tensor, right: Tensor, most_condition: float = MOST_CONDITION) -> Tensor:
    """R₁R₂ᵀ of left and of the transposed right factor; NaN members where one is not finite."""
    core = triangle(left, most_condition) @ triangle(right, most_condition).mT
    whole = core.isfinite().flatten(-2).all(-1)  # a column that is not finite has no finite length
    return core.masked_fill(~whole[..., None, None], torch.nan)


def _triplets(left: Tensor, right: Tensor, k: int) -> Tensor:
    """Columns u_i, σ_i, v_i under one another, so that pieces are one tensor: ``… d+1+e k``."""
    q1, r1 = torch.linalg.qr(left.double())
    q2, r2 = torch.linalg.qr(right.double())
    core = r1 @ r2.mT
    bad = ~core.isfinite().all(-1).all(-1)[..., None, None]
    u, s, v = torch.linalg.svd(core.masked_fill(bad, 0.0), full_matrices=False)
    parts = (q1 @ u[..., :k], s[..., None, :k], q2 @ v.mT[..., :k])
    return torch.cat(parts, -2).masked_fill(bad, torch.nan)


def _checked(function: Callable[[Tensor], Tensor], core: Tensor) -> Tensor:
    """Values of the cores that are finite, NaN for the others (LAPACK refuses the whole batch)."""
    bad = ~core.isfinite().all(-1).all(-1)
    if not bad.any():
        return function(core)
    return function(core.masked_fill(bad[..., None, None], 0.0)).masked_fill(
        bad[..., None], torch.nan
    )
