"""The learning rate as a function of the step alone.

    warmup:    peak · (t + 1) / warmup                                        t < warmup
    cosine:    final + (peak − final) · (1 + cos(π · (t − warmup) / (T − warmup))) / 2
    constant:  peak

Cosine: Loshchilov & Hutter 2017 (arXiv:1608.03983), equation 5, without restarts.
"""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["Shape", "learning_rate"]

Shape = Literal["constant", "cosine"]


def learning_rate(
    step: int,
    *,
    peak: float,
    steps: int,
    warmup: int = 0,
    shape: Shape = "cosine",
    final: float = 0,
) -> float:
    """The learning rate of ``step`` (from 0), of ``steps``; ``final`` is where the cosine ends.

    Example:
        >>> [learning_rate(t, peak=1.0, steps=6, warmup=2) for t in (0, 1, 2, 4)]
        [0.5, 1.0, 1.0, 0.5]
        >>> learning_rate(4, peak=1.0, steps=6, shape="constant")
        1.0
    """
    if step < warmup:
        return peak * (step + 1) / warmup
    if shape == "constant":
        return peak
    share = min(1.0, (step - warmup) / max(1, steps - warmup))
    return final + (peak - final) * (1 + math.cos(math.pi * share)) / 2
