"""Arithmetic that is no matrix product, kept apart: it is counted by convention, not exactly.

softmax          3 per score (exponential, sum, division): Hoffmann et al. 2022 (arXiv:2203.15556),
                 appendix F
norms            4 per gain or bias entry and token: square, sum, scale, gain (a LayerNorm has two)
nonlinearity     1 per hidden entry of the MLP, and 1 more for the product of a gated one
residual         1 per entry and sublayer
"""

from __future__ import annotations

from headwise.cost.blocks import inward
from headwise.cost.parts import Component, Parts
from headwise.cost.workload import Workload

__all__ = ["elementwise"]


def elementwise(parts: Parts, workload: Workload) -> dict[str, int]:
    """Operations of a forward pass that are no matrix products, by kind.

    Example:
        >>> from headwise.cost.explicit import explicit
        >>> parts = explicit(d_model=64, layers=2, heads=4, vocab=257)
        >>> elementwise(parts, Workload(length=8))
        {'softmax': 1536, 'norms': 10240, 'nonlinearity': 4096, 'residual': 2048}
    """
    encoder = parts.stack("encoder")
    source = 0 if encoder is None else (encoder.tokens or workload.encoded)
    found = {"softmax": 0, "norms": 0, "nonlinearity": 0, "residual": 0}
    for stack, _, attention in parts.attentions():
        pairs = workload.batch * workload.pair_count(attention, stack, source)
        found["softmax"] += 3 * attention.heads * pairs
    for stack, _, vector in parts.vectors():
        if vector.component is Component.NORMS:
            found["norms"] += 4 * vector.size * workload.batch * workload.queries(stack)
    for stack in parts.stacks:
        tokens = workload.batch * workload.queries(stack)
        for layer in stack.layers:
            found["nonlinearity"] += tokens * inward(layer.matrices)
            found["residual"] += tokens * stack.d_model * (1 + len(layer.attentions))
    return found
