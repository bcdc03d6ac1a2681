"""Attention: its definition, implicit masks, and the exact streaming forms in O(n) memory."""

from headwise.attention.definition import attention, entropy, log_sum_exp, output, scores, weights
from headwise.attention.statistics import Statistics, measure

__all__ = [
    "Statistics",
    "attention",
    "entropy",
    "log_sum_exp",
    "measure",
    "output",
    "scores",
    "weights",
]
