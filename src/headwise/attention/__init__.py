"""Attention: its definition, implicit masks, and the exact streaming forms in O(n) memory."""

from headwise.attention.definition import attention, entropy, log_sum_exp, output, scores, weights
from headwise.attention.statistics import Statistics, measure
from headwise.attention.streaming import attend, attend_with_lse

__all__ = [
    "Statistics",
    "attend",
    "attend_with_lse",
    "attention",
    "entropy",
    "log_sum_exp",
    "measure",
    "output",
    "scores",
    "weights",
]
