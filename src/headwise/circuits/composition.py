"""Which head reads what which earlier head wrote: composition of all pairs, exact, in tiles.

    c = ‖A B‖_F / (‖A‖_F ‖B‖_F),   A = W_OV of the writer
    B = W_QK (Q-composition), W_QKᵀ (K-composition) or W_OV (V-composition) of the reader

(Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; row vectors.) With
S = AᵀA and T = B Bᵀ, both d×d,

    ‖A B‖² = tr(AᵀA B Bᵀ) = ⟨S, T⟩ = Σ_ij S_ij T_ij

so all pairs together are one matrix product of (writers × d²) with (d² × readers). S and T are made
a tile of t×t at a time from the thin factors, S = rightᵀ (leftᵀ left) right, and never kept. Both
are symmetric: tiles above the diagonal count twice. A pair costs d² multiplications, the product
of its thin factors 2 d r². In float64: c has an error of 10⁻¹⁴ or so at its usual size 1/√d, and
at most about 10⁻⁸ where it is 0.

Null: the same two heads turned against each other at random (O uniform on the orthogonal group;
factors with independent Gaussian entries are such). From E O T Oᵀ = (tr T / d) I,

    E c² = 1/d   exactly, whatever the ranks and spectra: root mean square √(1/d)

and since O acts irreducibly on the symmetric matrices of trace 0, of dimension (d−1)(d+2)/2,

    Var c² = 2 (p − 1/d)(q − 1/d) / ((d−1)(d+2)),   p = ‖S‖² / (tr S)² = Σσ⁴/(Σσ²)²,  q alike

exactly too. z = (c² − 1/d) / √Var. Its tail is that of a Gaussian only for heads of many directions
(for rank 1, c² is a Beta(1/2, (d−1)/2): heavier); ``tail`` matches a Gamma to the two moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from headwise.circuits.factored import Factored
from headwise.errors import OptionError, ShapeError

__all__ = ["Composition", "composition", "extra_bytes"]

MEMORY = 96 * 2**20
LARGEST_TILE = 48


@dataclass(frozen=True, eq=False)
class Composition:
    """All pairs ``writer reader`` (heads numbered through the layers); NaN where none is possible.

    ``value`` is c, ``spread`` the standard deviation of c² under the null, ``d`` the width of the
    stream; ``writer_layer`` and ``reader_layer`` give the layer of each head.
    """

    value: Tensor
    spread: Tensor
    d: int
    writer_layer: Tensor
    reader_layer: Tensor

    @property
    def null(self) -> float:
        """√(1/d), the root mean square of c for heads turned at random."""
        return math.sqrt(1 / self.d)

    @property
    def ratio(self) -> Tensor:
        """c / null."""
        return self.value / self.null

    @property
    def z(self) -> Tensor:
        """(c² − 1/d) / spread."""
        return (self.value.square() - 1 / self.d) / self.spread

    @property
    def tail(self) -> Tensor:
        """Chance of a c at least this large under the null, by the Gamma of equal moments."""
        mean = 1 / self.d
        shape = mean * mean / self.spread.square()
        return torch.special.gammaincc(shape, shape * self.value.square() / mean)


@torch.no_grad()
def composition(
    writers: Sequence[Factored], readers: Sequence[Factored], *, memory: int = MEMORY
) -> Composition:
    """c of every head of a layer with every head of the later layers.

    ``writers[l]`` and ``readers[l]`` hold the heads of layer l (``head d r`` and ``head r e``):
    W_OV; and W_QK, W_QKᵀ or W_OV. Layers may differ in heads and ranks. ``memory`` bounds the
    bytes taken beside the weights (``extra_bytes`` is the need); smaller means smaller tiles.

    Example:
        >>> def heads():
        ...     return [Factored(torch.randn(3, 64, 8), torch.randn(3, 8, 64)) for _ in range(5)]
        >>> pairs = composition(heads(), heads())
        >>> pairs.value.shape, bool(pairs.value[3:, :6].isnan().all()), pairs.null
        (torch.Size([15, 15]), True, 0.125)
    """
    d = _width(writers, readers)
    tile = _tile(writers, readers, d, memory)
    write = _Side([(f.left, f.right) for f in writers])
    read = _Side([(f.right.mT, f.left.mT) for f in readers])
    inner = _inner(write, read, d, tile)
    size = write.trace[:, None] * read.trace
    square = (inner / size).clamp(0.0, 1.0)
    shares = [(side.square / side.trace.square() - 1 / d).clamp_min(0.0) for side in (write, read)]
    scale = math.sqrt(2 / ((d - 1) * (d + 2)))
    spread = scale * (shares[0].sqrt()[:, None] * shares[1].sqrt())
    impossible = read.layer <= write.layer[:, None]
    value = square.sqrt().masked_fill(impossible, torch.nan)
    spread = spread.masked_fill(impossible, torch.nan)
    return Composition(value, spread, d, write.layer, read.layer)


def extra_bytes(
    writers: Sequence[Factored], readers: Sequence[Factored], tile: int = LARGEST_TILE
) -> int:
    """What ``composition`` takes beside the weights, in bytes, with tiles of ``tile`` columns.

    8 · (N r² for the Gram matrices + N r t for these times t columns + 2 N t² for the tiles + 4·W·R
    for the results), with N all heads, writers and readers, and 32 · h r · max(t, 256) for the
    layer at work. The buffers of BLAS come on top, some 20 MiB whatever the sizes.

    Example:
        >>> head = Factored(torch.empty(32, 4096, 128), torch.empty(32, 128, 4096))
        >>> extra_bytes([head] * 32, [head] * 32) < 2 * 2**30
        True
    """
    heads = [[f.left.shape[0] for f in side] for side in (writers, readers)]
    both = [*writers, *readers]
    grams = sum(f.left.shape[0] * f.rank**2 for f in both)
    weighted = sum(f.left.shape[0] * f.rank for f in both) * tile
    tiles = 2 * sum(map(sum, heads)) * tile**2
    results = 4 * sum(heads[0]) * sum(heads[1])
    work = 4 * max(f.left.shape[0] * f.rank * max(tile, min(f.shape[-2], GRAM_ROWS)) for f in both)
    return 8 * (grams + weighted + tiles + results + work)


GRAM_ROWS = 256


class _Side:
    """One side of all pairs: S = Cᵀ G C with thin C and G = FᵀF, the layers one after the other."""

    def __init__(self, layers: list[tuple[Tensor, Tensor]]) -> None:
        self.thin = [thin for _, thin in layers]
        self.gram = [_gram(far) for far, _ in layers]
        trace, square = [], []
        for gram, thin in zip(self.gram, self.thin, strict=True):
            small = gram @ _gram(thin.mT)  # tr S = tr(G CCᵀ), ‖S‖² = tr((G CCᵀ)²)
            trace.append(small.diagonal(dim1=-2, dim2=-1).sum(-1))
            square.append((small * small.mT).sum((-2, -1)))
        self.trace, self.square = torch.cat(trace), torch.cat(square)
        counts = torch.tensor([thin.shape[0] for thin in self.thin])
        self.layer = torch.repeat_interleave(torch.arange(len(counts)), counts)
        self.starts = [0, *counts.cumsum(0).tolist()]

    def weighted(self, columns: slice) -> list[Tensor]:
        """G C[:, columns] of every head, by layer."""
        pairs = zip(self.gram, self.thin, strict=True)
        return [gram @ thin[..., columns].double() for gram, thin in pairs]

    def tile(self, rows: slice, weighted: list[Tensor]) -> Tensor:
        """S[rows, columns] of every head, ``head entry``, from what ``weighted`` gave."""
        first = self.thin[0]
        size = first[0, 0, rows].numel() * weighted[0].shape[-1]
        tiles = torch.empty(self.starts[-1], size, dtype=torch.float64, device=first.device)
        places = pairwise(self.starts)
        for right, thin, (a, b) in zip(weighted, self.thin, places, strict=True):
            tiles[a:b] = (thin[..., rows].double().mT @ right).flatten(1)
        return tiles


def _gram(far: Tensor) -> Tensor:
    """FᵀF in float64, some rows at a time."""
    total = torch.zeros(far.shape[0], far.shape[-1], far.shape[-1], dtype=torch.float64)
    total = total.to(far.device)
    for i in range(0, far.shape[-2], GRAM_ROWS):
        part = far[:, i : i + GRAM_ROWS].double()
        total.baddbmm_(part.mT, part)
    return total


def _inner(write: _Side, read: _Side, d: int, tile: int) -> Tensor:
    """⟨S, T⟩ of all pairs that are possible, tile by tile of the upper triangle."""
    total = torch.zeros(
        write.starts[-1], read.starts[-1], dtype=torch.float64, device=write.trace.device
    )
    layers = len(write.thin)
    groups = max(1, min(layers, 5))
    edges = [layers * g // groups for g in range(groups + 1)]
    for j in range(0, d, tile):
        _add_columns(total, write, read, edges, slice(j, j + tile))
    return total


def _add_columns(
    total: Tensor, write: _Side, read: _Side, edges: list[int], columns: slice
) -> None:
    """The tiles of some columns, down to the diagonal."""
    layers, tile = len(write.thin), columns.stop - columns.start
    for_s, for_t = write.weighted(columns), read.weighted(columns)
    for i in range(0, columns.stop, tile):
        rows = slice(i, i + tile)
        s, t = write.tile(rows, for_s), read.tile(rows, for_t)
        for first, last in pairwise(edges):
            a, b = write.starts[first], write.starts[last]
            later = read.starts[min(first + 1, layers)]
            if later < read.starts[-1]:
                alpha = 1 if rows == columns else 2
                total[a:b, later:].addmm_(s[a:b], t[later:].mT, alpha=alpha)


def _width(writers: Sequence[Factored], readers: Sequence[Factored]) -> int:
    """d, the width of the stream that all heads write to and read from."""
    widths = {f.shape[-1] for f in writers} | {f.shape[-2] for f in readers}
    batched = all(len(f.batch) == 1 for f in (*writers, *readers))
    if len(writers) != len(readers) or len(widths) != 1 or not batched or min(widths) < 2:
        raise ShapeError(
            f"{len(writers)} layers that write, {len(readers)} that read, widths {sorted(widths)}",
            allowed="as many layers on both sides, one width, products of the heads of one layer",
            to_do="give W_OV and W_QK (or W_OV) of the same layers of one stack",
        )
    return widths.pop()


def _tile(writers: Sequence[Factored], readers: Sequence[Factored], d: int, memory: int) -> int:
    """The widest tile that keeps within ``memory``."""
    tile = min(LARGEST_TILE, d)
    while tile > 1 and extra_bytes(writers, readers, tile) > memory:
        tile //= 2
    need = extra_bytes(writers, readers, tile)
    if need > memory:
        raise OptionError(
            f"composition of all pairs in {memory / 2**20:.0f} MiB",
            allowed=f"{math.ceil(need / 2**20)} MiB or more",
            to_do="allow more memory, or fewer layers",
        )
    return tile
