"""W_QK of a model with rotary positions: not one matrix but a family, W(Δ) = W_Q R_Δ W_Kᵀ.

    logit / scale = x W(Δ) x'ᵀ,   Δ = (position of the key) − (position of the query)

so a causal head uses Δ = 0, −1, −2, …. R_Δ turns pair m of a head's entries by Δ·θ_m and multiplies
it by the square of the attention factor; entries beyond the rotary width pass unchanged. A pair of
entries is a *band*; what passes counts as one more band, at the end.

**What does not depend on Δ.** Over whole turns, a rotated pair has the mean 0: over all distances,
only the entries that never turn (unrotated, or of frequency 0) are left, and a head with full
rotary has no such part: W_Q W_Kᵀ, the slice Δ = 0, is *not* it. Over the L distances of a trained
length slow pairs do not complete their turn and their mean is not 0. ``constant_part`` gives

    W̄ = (1/L) Σ_{δ<L} W(−δ) = W_Q R̄ W_Kᵀ     share = ‖W̄‖² / ((1/L) Σ ‖W(−δ)‖²)

W̄ is the fixed matrix nearest to the family (least squares), share what it explains of it, in
[0, 1]; both in closed form (geometric sums), for L → ∞ with ``length=None``.

Su et al. 2021 (arXiv:2104.09864), section 3.2; bands: Barbero et al. 2024 (arXiv:2410.06205).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from headwise.circuits.factored import Factored, triangle
from headwise.errors import OptionError, ShapeError
from headwise.positions.layout import Layout

__all__ = [
    "ConstantPart",
    "Turns",
    "at_offset",
    "band_products",
    "band_shares",
    "band_shares_of_data",
    "constant_part",
    "incomplete",
    "spectra",
]

_ROWS: Final = 256  # positions whose entries are held at once in float64


class Turns(Protocol):
    """How a layer turns its queries and keys, read off its weights."""

    @property
    def inv_freq(self) -> Tensor:
        """θ, radians per position, ``pair``."""

    @property
    def width(self) -> int:
        """How many entries of a head turn: 2 · pairs."""

    @property
    def layout(self) -> Layout:
        """Where the two members of a pair stand."""

    @property
    def factor(self) -> float:
        """The attention factor, on queries and on keys."""


class ConstantPart(NamedTuple):
    """W̄ (``head d_model d_model``, as factors) and its share of the family's energy, ``head``."""

    product: Factored
    share: Tensor


@torch.no_grad()
def at_offset(query: Tensor, key: Tensor, rotary: Turns, offset: float) -> Factored:
    """W(Δ) = W_Q R_Δ W_Kᵀ at one Δ = key position − query position, attention factor included.

    Shapes: query ``head d_model d_head``, key ``kv_head d_model d_head`` (shared in groups).

    Example:
        >>> from types import SimpleNamespace
        >>> turns = SimpleNamespace(
        ...     inv_freq=torch.tensor([math.pi]), width=2, layout=Layout.HALF, factor=1.0
        ... )
        >>> one = torch.ones(1, 1, 2)
        >>> [round(at_offset(one, one, turns, d).dense().item(), 6) for d in (0, -1, -2)]
        [2.0, -2.0, 2.0]
    """
    query, key = _in_pairs(query, rotary), _in_pairs(_shared(query, key), rotary)
    theta, gain = _bands(query, rotary)
    return Factored(query, _turned(key, torch.polar(gain, offset * theta)).mT)


@torch.no_grad()
def spectra(query: Tensor, key: Tensor, rotary: Turns, offsets: Tensor) -> Tensor:
    """Singular values of W(Δ), ``offset head d_head``: one QR of the factors serves all offsets.

    Example:
        >>> from types import SimpleNamespace
        >>> turns = SimpleNamespace(
        ...     inv_freq=torch.tensor([1.0, 0.1]), width=4, layout=Layout.HALF, factor=1.0
        ... )
        >>> query, key = torch.randn(6, 11, 5), torch.randn(2, 11, 5)
        >>> spectra(query, key, turns, torch.tensor([0, -1, -7])).shape
        torch.Size([3, 6, 5])
    """
    rank = min(query.shape[-2:])
    query, key = _in_pairs(query, rotary), _in_pairs(key, rotary)
    theta, gain = _bands(query, rotary)
    left, right = triangle(query), _shared(query, triangle(key))
    values = [
        torch.linalg.svdvals(left @ _turned(right, torch.polar(gain, delta * theta)).mT)
        for delta in offsets.tolist()
    ]
    return torch.stack(values)[..., :rank]


@torch.no_grad()
def band_shares(query: Tensor, key: Tensor, rotary: Turns) -> Tensor:
    """Share of each band from the weights alone, ``head band``; rows sum to 1.

    ‖W_Q^(m)‖_F ‖W_K^(m)‖_F · factor², with W^(m) the columns of pair m: the root mean squares of
    |q^(m)| and |k^(m)| for inputs of equal variance in all directions. The last band is what does
    not turn (0 where everything does).
    """
    sizes = [_band_norms(_in_pairs(x, rotary).square().sum(-2), rotary) for x in (query, key)]
    return _share(sizes[0] * _shared(query, sizes[1]), rotary)


@torch.no_grad()
def band_shares_of_data(
    q: Tensor, k: Tensor, rotary: Turns, *, causal: bool = True, keep: Tensor | None = None
) -> Tensor:
    """Share of each band on data: the mean of |q^(m)| |k^(m)| over all pairs of positions.

    Shapes: q ``batch head position d_head``, k ``batch kv_head position d_head`` (before or after
    the rotation: lengths do not change, so leave the factor to ``rotary``), ``keep`` ``batch
    position`` False for padding. Causal: only keys at or before the query. Rows ``head band`` sum
    to 1. O(positions) memory: a mean over pairs is a sum over queries of a running sum of keys.
    """
    if keep is not None:
        q, k = (x * keep[:, None, :, None] for x in (q, k))
    at = torch.arange(q.shape[2], device=q.device) if causal else None
    return _share(band_products(q, k, rotary, at), rotary)


@torch.no_grad()
def band_products(q: Tensor, k: Tensor, rotary: Turns, at: Tensor | None = None) -> Tensor:
    """Sum of |q^(m)| |k^(m)| over pairs of a query and a key, ``head band``; factors are not added.

    Sums of several texts add up. Shapes: q ``batch head row d_head``, k ``batch kv_head key
    d_head``, ``at`` ``row``: the last key that each query is paired with (None: all keys).

    Example:
        >>> from types import SimpleNamespace
        >>> turns = SimpleNamespace(
        ...     inv_freq=torch.tensor([1.0]), width=2, layout=Layout.HALF, factor=1.0
        ... )
        >>> x = torch.tensor([[[[3.0, 4.0], [6.0, 8.0]]]])  # lengths 5 and 10
        >>> band_products(x, x, turns, torch.tensor([0, 1])).tolist()  # 5·5 + 10·(5 + 10)
        [[175.0, 0.0]]
    """
    some = (_band_norms(_in_pairs(x, rotary).square(), rotary) for x in k.split(_ROWS, 2))
    keys = torch.cat(list(some), 2)
    keys = keys.sum(2, keepdim=True) if at is None else keys.cumsum_(2)
    group = _group(q.shape[1], k.shape[1])
    total = torch.zeros(q.shape[1], keys.shape[-1], dtype=torch.float64, device=q.device)
    for start in range(0, q.shape[2], _ROWS):
        rows = slice(start, start + _ROWS)
        queries = _band_norms(_in_pairs(q[:, :, rows], rotary).square(), rotary)
        seen = keys if at is None else keys[:, :, at[rows]]
        pairs = queries.unflatten(1, (-1, group)) * seen[:, :, None]
        total += pairs.sum((0, 3)).flatten(0, 1)
    return total


def incomplete(rotary: Turns, length: int) -> Tensor:
    """Which pairs never complete a turn within ``length`` positions: length · θ < 2π (bool, pair).

    Longer texts show such a pair angles that training never did.

    Example:
        >>> from types import SimpleNamespace
        >>> theta = 10000.0 ** -(torch.arange(64, dtype=torch.float64) / 64)
        >>> int(incomplete(SimpleNamespace(inv_freq=theta), 4096).sum())
        18
    """
    if length < 1:
        raise OptionError(
            f"a trained length of {length}", allowed="1 or more", to_do="give it in tokens"
        )
    return rotary.inv_freq.double().abs() * length < 2 * math.pi


@torch.no_grad()
def constant_part(
    query: Tensor, key: Tensor, rotary: Turns, length: int | None = None
) -> ConstantPart:
    """The mean W̄ of the family over the distances 0 … length − 1 and what it explains of it.

    ``length=None``: the limit of all distances, in which only what never turns is left.
    """
    if length is not None and length < 1:
        raise OptionError(f"a length of {length}", allowed="1 or more", to_do="leave it out")
    query, key = _in_pairs(query, rotary), _in_pairs(_shared(query, key), rotary)
    theta, gain = _bands(query, rotary)
    product = Factored(query, _turned(key, gain * _mean_turn(theta, length)).mT)
    scaled = _turned(key, torch.complex(gain, torch.zeros_like(gain)))
    total = _mean_energy(query.mT @ query, scaled.mT @ scaled, theta, length)
    share = product.norm().square() / total
    return ConstantPart(product, share.clamp(0.0, 1.0))


def _mean_turn(theta: Tensor, length: int | None) -> Tensor:
    """(1/L) Σ_{δ<L} e^{−iθδ}; for L → ∞, 1 where θ is 0 and 0 elsewhere."""
    if length is None:
        return (theta == 0).to(torch.complex128)
    half = torch.remainder(theta + math.pi, 2 * math.pi) / 2 - math.pi / 2  # whole turns drop out
    small = half.sin() == 0
    size = (half * length).sin() / (length * half.sin().masked_fill(small, 1.0))
    return torch.polar(size.masked_fill(small, 1.0), -half * (length - 1))


def _mean_energy(first: Tensor, second: Tensor, theta: Tensor, length: int | None) -> Tensor:
    """Mean of ‖W(−δ)‖² = tr(Rᵀ G_Q R G_K) from the Gram matrices of W_Q and W_K.

    A 2×2 block of a Gram matrix is v ↦ z v + w v̄ on complex numbers; turning its two sides by φ_m
    and φ_n multiplies z by e^{i(φ_n − φ_m)} and w by e^{−i(φ_m + φ_n)}. Blocks have the inner
    product 2 Re(z z̄' + w w̄').
    """
    (z, w), (zz, ww) = _parts(first), _parts(second)
    turn_z = _mean_turn(theta[None, :] - theta[:, None], length)
    turn_w = _mean_turn(-(theta[None, :] + theta[:, None]), length)
    return 2 * (z * zz.conj() * turn_z + w * ww.conj() * turn_w).real.sum((-2, -1))


def _parts(gram: Tensor) -> tuple[Tensor, Tensor]:
    blocks = gram.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).transpose(-3, -2)
    a, b, c, d = blocks[..., 0, 0], blocks[..., 0, 1], blocks[..., 1, 0], blocks[..., 1, 1]
    return torch.complex(a + d, c - b) / 2, torch.complex(a - d, b + c) / 2


def _in_pairs(x: Tensor, rotary: Turns) -> Tensor:
    """Entries in float64 with the members of each pair side by side, a 0 added to an odd rest."""
    width, pairs = rotary.width, rotary.inv_freq.numel()
    if width != 2 * pairs or width > x.shape[-1]:
        raise ShapeError(
            f"{pairs} frequencies and a rotary width of {width} for heads of {x.shape[-1]} entries",
            allowed="two entries for each frequency, and no more than a head has",
            to_do="take weights and rotation from the same layer",
        )
    turned, rest = x[..., :width].double(), x[..., width:].double()
    if Layout(rotary.layout) is Layout.HALF:
        turned = turned.unflatten(-1, (2, pairs)).mT.flatten(-2)
    return torch.nn.functional.pad(torch.cat((turned, rest), -1), (0, rest.shape[-1] % 2))


def _bands(x: Tensor, rotary: Turns) -> tuple[Tensor, Tensor]:
    """Angle for each step and factor² of all pairs of ``_in_pairs``; what passes has 0 and 1."""
    more = x.shape[-1] // 2 - rotary.inv_freq.numel()
    theta = torch.nn.functional.pad(rotary.inv_freq.double().to(x.device), (0, more))
    gain = torch.full_like(rotary.inv_freq, rotary.factor**2, dtype=torch.float64)
    return theta, torch.nn.functional.pad(gain.to(x.device), (0, more), value=1.0)


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    """Every pair of x, taken as a complex number, times its ``turn``."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def _band_norms(squares: Tensor, rotary: Turns) -> Tensor:
    """Lengths of the bands from squared entries: every pair, then all that passes."""
    width = rotary.width
    pairs = squares[..., :width].unflatten(-1, (-1, 2)).sum(-1)
    return torch.cat((pairs, squares[..., width:].sum(-1, keepdim=True)), -1).sqrt()


def _share(sizes: Tensor, rotary: Turns) -> Tensor:
    gain = torch.full_like(sizes, rotary.factor**2)
    gain[..., -1] = 1.0
    sizes = sizes * gain
    return sizes / sizes.sum(-1, keepdim=True)


def _group(heads: int, kv_heads: int) -> int:
    if kv_heads < 1 or heads % kv_heads:
        raise ShapeError(
            f"{heads} query heads and {kv_heads} key heads",
            allowed="a multiple",
            to_do="take both from the same layer",
        )
    return heads // kv_heads


def _shared(query: Tensor, key: Tensor) -> Tensor:
    """Keys for every query head: head h reads kv head h // group."""
    return key.repeat_interleave(_group(query.shape[0], key.shape[0]), 0)
