"""Attention: its definition, implicit masks, and the exact streaming forms in O(n) memory."""

from headwise.attention.definition import attention, entropy, log_sum_exp, output, scores, weights

__all__ = [
    "attention",
    "entropy",
    "log_sum_exp",
    "output",
    "scores",
    "weights",
]
