"""Attention: its definition, implicit masks, and the exact streaming forms in O(n) memory."""

from headwise.attention.definition import attention, entropy, log_sum_exp, output, scores, weights
from headwise.attention.feature_maps import PositiveRandomFeatures, elu_plus_one
from headwise.attention.linear import (
    LinearState,
    linear_attention,
    linear_attention_chunked,
    linear_attention_parallel,
    linear_attention_recurrent,
)
from headwise.attention.linear_definition import kernel_attention, kernel_matrix
from headwise.attention.statistics import Statistics, measure
from headwise.attention.streaming import attend, attend_with_lse

__all__ = [
    "LinearState",
    "PositiveRandomFeatures",
    "Statistics",
    "attend",
    "attend_with_lse",
    "attention",
    "elu_plus_one",
    "entropy",
    "kernel_attention",
    "kernel_matrix",
    "linear_attention",
    "linear_attention_chunked",
    "linear_attention_parallel",
    "linear_attention_recurrent",
    "log_sum_exp",
    "measure",
    "output",
    "scores",
    "weights",
]
