"""How large a logit can become where queries and keys pass norms of their own.

An RMSNorm or LayerNorm over n entries gives q = diag(γ_q) u with |u| <= √n, whatever it is given
(|u|² = n m/(m + ε) for a mean square m: √n is reached as ε/m goes to 0). For a head whose queries
are normed over n_q entries and whose keys are over n_k,

    |scale · q R_Δ kᵀ| <= scale · √(n_q n_k) · σ₁(diag(γ_q) R_Δ diag(γ_k))

and the largest of those spectral norms over all Δ is, since R_Δ only turns pairs of entries,

    max( f² max_m max|γ_q^(m)| max|γ_k^(m)|,  max_i |γ_q,i γ_k,i| )

over the pairs m (f: the attention factor on queries and keys) and the entries i that do not turn.
Without rotation, or where the largest gains of the best pair stand at one entry, RMSNorms reach it
at distance 0; else as closely as some distance turns that pair by a quarter. Logits before softcap,
learned biases by distance and mask.

Henry et al. 2020 (arXiv:2010.04245): norms of queries and keys so that logits are bounded; Dehghani
et al. 2023 (arXiv:2302.05442), section 2: the same against logits that grow in training.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.circuits.layer_weights import LayerWeights, RotaryUse
from headwise.circuits.norms import HeadNorm
from headwise.positions import Layout

__all__ = ["logit_bound"]


@torch.no_grad()
def logit_bound(layer: LayerWeights) -> Tensor | None:
    """The bound above of every head, ``head`` float64.

    ``layer`` is as it was read: ``folded``, the gains are no longer in its norms. None unless both
    queries and keys pass norms, without biases: then only the size of the stream bounds a logit.

    Example:
        >>> from headwise.circuits.head_weights import head_weights
        >>> from headwise.models import build, decoder_sizes
        >>> sizes = {"vocab": 31, "d_model": 24, "layers": 1, "heads": 4, "d_ff": 31, "context": 19}
        >>> layer = head_weights(build(decoder_sizes(**sizes, qk_norm="head"))).layers[0]
        >>> bound = logit_bound(layer)  # gains are 1: scale · d_head = √6
        >>> [round(x, 6) for x in bound.tolist()]
        [2.44949, 2.44949, 2.44949, 2.44949]
    """
    query, key = layer.query_norm, layer.key_norm
    if query is None or key is None or query.bias is not None or key.bias is not None:
        return None
    entries = layer.query.shape[2]
    size = math.sqrt(_width(query, layer.heads, entries) * _width(key, layer.kv_heads, entries))
    gains = _gain(query, layer).expand(layer.heads, -1), layer.shared(_gain(key, layer))
    return abs(layer.scale) * size * _largest(*gains, layer.rotary)


def _width(norm: HeadNorm, heads: int, entries: int) -> int:
    """n: over how many entries the norm is taken."""
    return heads * entries if norm.across else entries


def _gain(norm: HeadNorm, layer: LayerWeights) -> Tensor:
    """|γ|, ``head entry``, or one row for all heads."""
    if norm.gain is None:
        width, device = layer.query.shape[2], layer.query.device
        return torch.ones(1, width, dtype=torch.float64, device=device)
    return norm.gain.double().abs()


def _largest(query: Tensor, key: Tensor, rotary: RotaryUse | None) -> Tensor:
    """max over Δ of σ₁(diag(γ_q) R_Δ diag(γ_k)), ``head``."""
    if rotary is None:
        return (query * key).amax(-1)
    width = rotary.width
    half = Layout(rotary.layout) is Layout.HALF
    shape, member = ((2, width // 2), -2) if half else ((width // 2, 2), -1)
    in_pair = [x[:, :width].unflatten(-1, shape).amax(member) for x in (query, key)]
    turned = rotary.factor**2 * (in_pair[0] * in_pair[1])
    return torch.cat((turned, query[:, width:] * key[:, width:]), -1).amax(-1)
