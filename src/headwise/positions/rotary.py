"""Rotary positions: each pair of entries of a query or key turns by position · frequency.

    R_p x:   (a, b) -> (a cos pθ − b sin pθ, a sin pθ + b cos pθ)   for every pair

Rotations add up, so ⟨R_p q, R_p' k⟩ = ⟨q, R_{p'−p} k⟩: the logit sees only p' − p. Angles are
computed in float64 (or float32, if the frequencies are) and never in half precision, where
positions above 256 (bfloat16) or 2048 (float16) collapse.

Su et al. 2021 (arXiv:2104.09864), section 3.2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.errors import OptionError, ShapeError
from headwise.positions.layout import Layout
from headwise.positions.scalings import Frequencies, Scaling, plain

__all__ = [
    "Rotation",
    "Spread",
    "apply_rotation",
    "frequencies",
    "rotate",
    "rotation",
    "spread",
    "turn",
]


class Rotation(NamedTuple):
    """Cosines and sines, ``position pair`` or ``batch position pair``; one for all layers."""

    cos: Tensor
    sin: Tensor


class Spread(NamedTuple):
    """A rotation with a cosine and a signed sine for every entry of a head, made by ``spread``."""

    cos: Tensor
    sin: Tensor
    layout: Layout


def frequencies(
    width: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    length: int | None = None,
) -> Frequencies:
    """The frequencies of ``width`` rotated entries (float64, ``pair``) and the attention factor.

    θ_i = base^(−2i/width), changed by ``scaling``. ``length`` is the length of the sequence, for
    the scalings that look at it (dynamic NTK, LongRoPE); None: within the trained length.

    Example:
        >>> inv_freq, attention_factor = frequencies(4, base=100.0)
        >>> [round(x, 6) for x in inv_freq.tolist()], attention_factor
        ([1.0, 0.1], 1.0)
    """
    if scaling is None:
        return Frequencies(plain(width, base), 1.0)
    return scaling.frequencies(width, base, length)


def rotation(
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    factor: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Rotation:
    """factor · cos(pθ) and factor · sin(pθ) for positions ``position`` or ``batch position``.

    Angles have the precision of ``inv_freq``; the results are rounded once, to ``dtype``.

    Example:
        >>> turns = rotation(torch.tensor([0, 131071]), torch.ones(1, dtype=torch.float64))
        >>> [round(x, 4) for x in turns.cos[:, 0].tolist()]
        [1.0, -0.818]
    """
    for name, x in (("frequencies", inv_freq), ("position ids", position_ids)):
        if x.dtype in (torch.float16, torch.bfloat16, torch.bool) or x.is_complex():
            raise OptionError(
                f"rotary {name} of type {x.dtype}, in which positions run together",
                allowed="float64 or float32 (position ids: also whole numbers)",
                to_do="keep them out of the conversion of the model to half precision",
            )
    if inv_freq.dim() != 1 or not inv_freq.is_floating_point() or position_ids.dim() not in (1, 2):
        raise ShapeError(
            f"rotary frequencies of shape {tuple(inv_freq.shape)} ({inv_freq.dtype}) and position"
            f" ids of shape {tuple(position_ids.shape)}",
            allowed="frequencies (pair,) and position ids (position,) or (batch, position)",
            to_do="take the frequencies from frequencies(width)",
        )
    theta = inv_freq.to(position_ids.device)
    angle = position_ids.to(theta.dtype)[..., None] * theta
    return Rotation((angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype))


def apply_rotation(x: Tensor, turns: Rotation, *, layout: Layout | str = Layout.HALF) -> Tensor:
    """Turn the first 2·pairs entries of every vector of x; the others pass (partial rotary).

    Shapes: x ``… position dim`` (``batch`` first if the rotation has one). Computed in the wider of
    the two types and rounded once to that of x.

    Example:
        >>> x = torch.tensor([[1.0, 0.0, 7.0]])
        >>> quarter = Rotation(torch.zeros(1, 1), torch.ones(1, 1))
        >>> apply_rotation(x, quarter).tolist()
        [[0.0, 1.0, 7.0]]
    """
    layout = Layout(layout)
    cos, sin = (_aligned(x, part) for part in turns)
    pairs = cos.shape[-1]
    turned, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if layout is Layout.HALF:
        a, b = turned[..., :pairs], turned[..., pairs:]
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    else:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    out = out.to(x.dtype)
    return out if rest.shape[-1] == 0 else torch.cat((out, rest), -1)


def spread(turns: Rotation, *, layout: Layout | str = Layout.HALF) -> Spread:
    """The rotation written out for ``turn``: done once for all layers, where it saves most steps.

    Cosines and sines become ``position entry``, or ``batch 1 position entry``: the axis of heads.
    """
    layout = Layout(layout)
    cos, sin = turns
    if layout is Layout.HALF:
        both = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    else:
        both = (
            torch.stack((cos, cos), -1).flatten(-2),
            torch.stack((-sin, sin), -1).flatten(-2),
        )
    cos, sin = (part if part.dim() == 2 else part[:, None] for part in both)
    return Spread(cos, sin, layout)


def turn(x: Tensor, turns: Spread) -> Tensor:
    """x · cos + (x with the members of each pair exchanged) · (∓sin): equal to ``apply_rotation``.

    Shapes: x ``batch head position dim``; the entries beyond the rotation's pass. Rounded once.

    Example:
        >>> x = torch.randn(1, 2, 3, 6)
        >>> inv_freq, _ = frequencies(4)
        >>> turns = rotation(torch.arange(3), inv_freq)
        >>> bool(torch.allclose(turn(x, spread(turns)), apply_rotation(x, turns)))
        True
    """
    width = turns.cos.shape[-1]
    rest = None if width == x.shape[-1] else x[..., width:]
    turned = x if rest is None else x[..., :width]
    if turns.layout is Layout.HALF:
        swapped = torch.cat((turned[..., width // 2 :], turned[..., : width // 2]), -1)
    else:
        swapped = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    out = torch.addcmul(turned * turns.cos, swapped, turns.sin).to(x.dtype)
    return out if rest is None else torch.cat((out, rest), -1)


def rotate(
    x: Tensor,
    position_ids: Tensor,
    inv_freq: Tensor,
    *,
    layout: Layout | str = Layout.HALF,
    factor: float = 1.0,
) -> Tensor:
    """factor · R_p x for every position: queries or keys ``batch head position dim``, turned.

    ``position_ids`` is ``position`` or ``batch position``, ``inv_freq`` ``pair``; the first 2·pairs
    entries turn, the others pass. ``factor`` is the attention factor of the scaling. Float64 in
    float64, everything else in float32, rounded once at the end.

    Example:
        >>> inv_freq, _ = frequencies(4)
        >>> q, k = torch.ones(2, 1, 4, dtype=torch.float64)
        >>> def logit(p, r):
        ...     return rotate(q, p, inv_freq) @ rotate(k, r, inv_freq).T
        >>> near, far = torch.tensor([[[0], [3]], [[1000], [1003]]])
        >>> bool(torch.allclose(logit(*near), logit(*far)))
        True
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    turns = rotation(position_ids.to(x.device), inv_freq, factor=factor, dtype=dtype)
    return apply_rotation(x, turns, layout=layout)


def _aligned(x: Tensor, part: Tensor) -> Tensor:
    """Cosines or sines with axes of size 1 between batch and position, as x has axes there."""
    batched = part.dim() == 3
    fits = (
        x.dim() >= part.dim()
        and part.shape[-2] == x.shape[-2]
        and 2 * part.shape[-1] <= x.shape[-1]
        and (not batched or part.shape[0] in (1, x.shape[0]))
    )
    if not fits:
        raise ShapeError(
            f"a rotation of shape {tuple(part.shape)} for vectors of shape {tuple(x.shape)}",
            allowed="one position id for each position, and at most as many rotated entries as"
            " the vectors have",
            to_do="check the position ids and the rotary width",
        )
    if not batched:
        return part
    return part.view(part.shape[0], *(1,) * (x.dim() - 3), *part.shape[1:])
