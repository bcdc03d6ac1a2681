"""Models whose heads are read, and logits computed from products by the test's own rotation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headwise.circuits.head_weights import LayerWeights, RotaryUse
from headwise.circuits.layouts import FAMILIES
from headwise.circuits.probe import Probe, probe
from headwise.observation.survey import survey
from tests.parity import families

__all__ = ["DIRECTIONS", "FIXED", "NAMES", "dense_logits", "shaken", "shown", "tiny", "turn_matrix"]

# Those of latent attention have a file of their own.
NAMES = tuple(
    name
    for name in families.FAMILIES
    if name == "clip" or (name in FAMILIES and FAMILIES[name].latent is None)
)
DIRECTIONS = ("qwen3", "qwen3_moe", "olmo2", "gemma3_text")  # queries and keys have norms
FIXED = tuple(name for name in NAMES if name not in DIRECTIONS)


def tiny(name: str, auto: Any = None, **more: Any) -> PreTrainedModel:
    """A tiny model in float64 with every parameter away from 0 and 1, so that each matters."""
    model = families.build(name, **({} if auto is None else {"auto": auto}), **more)
    return shaken(families.in_double(model))


def shaken(model: Any) -> Any:
    """Noise on every parameter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_((0.15 * noise).to(parameter.dtype))
    return model


def shown(model: nn.Module) -> Probe:
    """What a pass of a few tokens shows."""
    return probe(model, survey(model), set())


def turn_matrix(rotary: RotaryUse, width: int, distance: int) -> Tensor:
    """R of q R kᵀ for a key ``distance`` positions after the query, ``width width``, by 2×2 blocks.

    Row vectors: q turned by pθ is q T(p) with T(p) = [[cos, sin], [−sin, cos]], and
    (q T(p)) (k T(r))ᵀ = q T(p) T(r)ᵀ kᵀ = q T(p − r) kᵀ.
    """
    out = torch.eye(width, dtype=torch.float64)
    for pair, theta in enumerate(rotary.inv_freq.tolist()):
        angle = torch.tensor(-distance * theta, dtype=torch.float64)
        half = rotary.layout == "half"
        a, b = (pair, pair + rotary.width // 2) if half else (2 * pair, 2 * pair + 1)
        out[a, a] = out[b, b] = angle.cos()
        out[a, b], out[b, a] = angle.sin(), -angle.sin()
    return rotary.factor**2 * out


def dense_logits(w: LayerWeights, x: Tensor, source: Tensor, folded: bool = False) -> Tensor:
    """scale · (x_i W_Q + b_Q) R (y_j W_K + b_K)ᵀ of every head, from ``qk`` and the biases.

    Shapes: x ``query d_model``, source ``key d_model`` -> ``head query key``.
    """
    product = w.qk(folded)
    own = w.folded() if folded else w
    q, k = x @ product.left, source @ product.right.mT
    if own.query_bias is not None:
        q = q + own.query_bias[:, None]
    if own.key_bias is not None:
        k = k + own.shared(own.key_bias)[:, None]
    if own.rotary is None:
        return w.scale * q @ k.mT
    out = torch.empty(w.heads, len(x), len(source), dtype=torch.float64)
    for i in range(len(x)):
        for j in range(len(source)):
            turned = q[:, i] @ turn_matrix(own.rotary, q.shape[-1], j - i)
            out[:, i, j] = w.scale * (turned * k[:, j]).sum(-1)
    return out
