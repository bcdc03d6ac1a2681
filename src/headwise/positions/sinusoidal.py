"""Sinusoidal positions, and the linear map that moves every one of them by the same step.

    PE(p)_{2i} = sin(p ω_i)    PE(p)_{2i+1} = cos(p ω_i)    ω_i = base^(−2i/width)

For an even width PE(p)·PE(p + k) = Σ_i cos(ω_i k) whatever p, and ‖PE(p)‖² = width/2.

Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import OptionError
from headwise.positions.layout import Layout, half_order
from headwise.positions.powers import powers

__all__ = ["shift_matrix", "sinusoidal", "sinusoidal_table"]


def sinusoidal_table(
    length: int,
    width: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    layout: Layout | str = Layout.INTERLEAVED,
) -> Tensor:
    """The rows PE(0), …, PE(length − 1): ``position width``.

    Example:
        >>> sinusoidal_table(2, 4)[0].tolist()
        [0.0, 1.0, 0.0, 1.0]
    """
    if length < 0:
        raise OptionError(
            f"a table of {length} positions", allowed="0 or more", to_do="give the longest length"
        )
    return sinusoidal(torch.arange(length), width, base=base, dtype=dtype, layout=layout)


def sinusoidal(
    position_ids: Tensor,
    width: int,
    *,
    base: float = 10000.0,
    dtype: torch.dtype = torch.float32,
    layout: Layout | str = Layout.INTERLEAVED,
) -> Tensor:
    """PE(p) of given positions, of any sign and size: ``… -> … width``, rounded once from float64.

    An odd width lacks the last cosine. The half layout (all sines, then all cosines) is Marian's.

    Example:
        >>> [round(x, 4) for x in sinusoidal(torch.tensor([3]), 3)[0].tolist()]
        [0.1411, -0.99, 0.0065]
    """
    omega = _omega(width, base).to(position_ids.device)
    angle = position_ids.to(torch.float64)[..., None] * omega
    table = torch.stack((angle.sin(), angle.cos()), -1).flatten(-2)[..., :width]
    if Layout(layout) is Layout.HALF:
        table = table[..., half_order(width).to(table.device)]
    return table.to(dtype)


def shift_matrix(
    width: int,
    delta: float,
    *,
    base: float = 10000.0,
    layout: Layout | str = Layout.INTERLEAVED,
) -> Tensor:
    """The rotation M, the same for every p, with PE(p + delta) = M PE(p), in float64.

    Shape ``width width``: one 2×2 block ((cos, sin), (−sin, cos)) of the angle ω_i · delta for each
    pair, so M is orthogonal, and M(a) M(b) = M(a + b).

    Example:
        >>> table = sinusoidal_table(8, 6, dtype=torch.float64)
        >>> bool(torch.allclose(table[:5] @ shift_matrix(6, 3).T, table[3:]))
        True
    """
    if width % 2:
        raise OptionError(
            f"a shift matrix for the odd width {width}, whose last sine has no cosine to turn into",
            allowed="an even width",
            to_do="widen the table by one column",
        )
    angle = _omega(width, base) * delta
    cos, sin = angle.cos(), angle.sin()
    blocks = torch.stack((torch.stack((cos, sin), -1), torch.stack((-sin, cos), -1)), -2)
    matrix = torch.block_diag(*blocks)
    if Layout(layout) is Layout.HALF:
        order = half_order(width)
        matrix = matrix[order][:, order]
    return matrix


def _omega(width: int, base: float) -> Tensor:
    """ω_i for every pair, begun pairs included."""
    if width < 1:
        raise OptionError(
            f"sinusoidal positions of width {width}",
            allowed="1 or more",
            to_do="give the model's width",
        )
    return powers(width, base, of="sinusoidal positions with base", to_do="leave it out for 10000")
