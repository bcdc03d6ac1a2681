"""Attention with a kernel φ(q)·φ(k) in place of exp(scale · q·k), by the book.

    K_ij = φ(q_i)·φ(k_j)                        kernel_matrix
    o_i  = Σ_j K_ij v_j / Σ_j K_ij              kernel_attention, over the visible keys j

The whole ``query key`` matrix is built, in whatever precision is given (float64 in the tests). The
linear forms in ``linear`` never import this; the tests tie them to it.

Katharopoulos et al. 2020 (arXiv:2006.16236), section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.attention.definition import output
from headwise.attention.feature_maps import FeatureMap
from headwise.attention.heads import share_kv_heads
from headwise.attention.masks import Mask
from headwise.attention.problem import check_shapes

__all__ = ["kernel_attention", "kernel_matrix"]


def kernel_matrix(q: Tensor, k: Tensor, feature_map: FeatureMap) -> Tensor:
    """K_ij = φ(q_i)·φ(k_j) >= 0.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head`` ->
    ``batch head query key``.

    Example:
        >>> from headwise.attention.feature_maps import elu_plus_one
        >>> q, k = torch.zeros(1, 1, 1, 2), torch.ones(1, 1, 3, 2)  # φ(0) = 1, φ(1) = 2
        >>> kernel_matrix(q, k, elu_plus_one).flatten().tolist()
        [4.0, 4.0, 4.0]
    """
    return feature_map(q) @ share_kv_heads(feature_map(k), q.shape[1]).transpose(-1, -2)


def kernel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: FeatureMap,
    *,
    mask: Mask | None = None,
    offset: int | None = None,
) -> Tensor:
    """o_i = Σ_j K_ij v_j / Σ_j K_ij: kernel smoothing of the visible values.

    Shapes: q ``batch head query d_head``, k ``batch kv_head key d_head``,
    v ``batch kv_head key d_value`` -> ``batch head query d_value``, in v's dtype. A query with no
    visible key gives 0; one whose visible kernel values all vanish gives NaN. Cost
    O(query · key · (feature + d_value)) time, O(query · key) memory.

    Example:
        >>> from headwise.attention.feature_maps import elu_plus_one
        >>> from headwise.attention.masks import Causal
        >>> v = torch.tensor([1.0, 3.0]).view(1, 1, 2, 1)
        >>> zero = torch.zeros_like(v)
        >>> kernel_attention(zero, zero, v, elu_plus_one, mask=Causal()).flatten().tolist()
        [1.0, 2.0]
    """
    check_shapes(q, k, v, mask, None, None)
    kernel = kernel_matrix(q, k, feature_map)
    keep = torch.ones_like(kernel, dtype=torch.bool)
    if mask is not None:
        rows = [mask.dense(b, q.shape[2], k.shape[2], offset) for b in range(q.shape[0])]
        keep = torch.stack(rows)[:, None].to(q.device).expand_as(kernel)
    kernel = torch.where(keep, kernel, 0.0)
    total = torch.where(keep.any(-1), kernel.sum(-1), 1.0)
    return output(kernel / total[..., None], v.to(kernel.dtype)).to(v.dtype)
