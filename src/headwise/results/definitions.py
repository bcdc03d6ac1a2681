"""The definitions of every statistic in words: the texts of the schema.

Notation: s are the logits after scaling, softcap, bias and mask; a = softmax(s) are the weights,
before dropout; i is the query, j the key; logarithms are natural. A row without a visible key is
left out of every mean and counted in ``rows_empty``.
"""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["MAPS", "MORE_ROWS", "NOT_PER_ROW", "PER_BLOCK", "PER_HEAD", "Kind", "Sampling"]

Kind = Literal["float64", "float32", "int64", "bool", "str"]
# What the number is when only some rows were measured.
Sampling = Literal["mean", "extreme", "quantile", "measured", "whole"]

_ZHAI = "Zhai et al. 2023 (arXiv:2303.06296)"
_GU = "Gu et al. 2024 (arXiv:2410.10781)"
_WORTSMAN = "Wortsman et al. 2023 (arXiv:2309.14322)"
_SUN = "Sun et al. 2024 (arXiv:2402.17762)"
_VOITA = "Voita et al. 2019 (arXiv:1905.09418)"

# name: (units, long name, formula in words, source, sampling)
PER_HEAD: Final[dict[str, tuple[str, str, str, str, Sampling]]] = {
    "entropy": (
        "nats",
        "entropy of the weights",
        "mean over rows of −Σ_j a_ij ln a_ij",
        _ZHAI,
        "mean",
    ),
    "entropy_fraction": (
        "1",
        "entropy as a share of its maximum",
        "mean over rows with two or more visible keys of entropy / ln(visible keys): "
        "1 is uniform, 0 is one key",
        _ZHAI,
        "mean",
    ),
    "entropy_without_sink": (
        "nats",
        "entropy without the sink",
        "mean over rows of the entropy of the weights on the keys after the first sink_keys, "
        "renormalised to sum to 1",
        _GU,
        "mean",
    ),
    "entropy_without_sink_fraction": (
        "1",
        "entropy without the sink as a share of its maximum",
        "mean over rows with two or more visible keys outside the sink of "
        "entropy_without_sink / ln(visible keys outside the sink)",
        _GU,
        "mean",
    ),
    "effective_keys": (
        "keys",
        "effective number of keys",
        "mean over rows of 1 / Σ_j a_ij²: n for n equal weights, 1 for a single key",
        "inverse participation ratio",
        "mean",
    ),
    "jacobian_trace": (
        "1",
        "trace of the softmax Jacobian",
        "mean over rows of 1 − Σ_j a_ij² = tr(diag a − a aᵀ): near 0 no gradient passes",
        "derivative of the softmax",
        "mean",
    ),
    "top_weight": (
        "1",
        "largest weight",
        "mean over rows of max_j a_ij (head confidence)",
        _VOITA,
        "mean",
    ),
    "dead_rows": (
        "1",
        "share of saturated rows",
        "share of the rows with two or more visible keys whose largest weight is above 0.999, so "
        "that almost no gradient passes",
        "1 − max_j a_ij < 0.001",
        "mean",
    ),
    "dead_rows_not_sink": (
        "1",
        "share of rows saturated outside the sink",
        "share of the rows with two or more visible keys whose largest weight is above 0.999 and "
        "is not on one of the first sink_keys keys",
        "1 − max_j a_ij < 0.001",
        "mean",
    ),
    "distance": (
        "tokens",
        "mean attended distance",
        "mean over rows of Σ_j a_ij |i − j|; self-attention only",
        "",
        "mean",
    ),
    "sink_mass": (
        "1",
        "weight on the sink",
        "mean over rows of the weight on the first sink_keys keys",
        _GU,
        "mean",
    ),
    "self_mass": (
        "1",
        "weight on the token itself",
        "mean over rows of a_ii; self-attention only",
        "",
        "mean",
    ),
    "previous_mass": (
        "1",
        "weight on the previous token",
        "mean over rows of a_i,i−1; self-attention only",
        "Olsson et al. 2022 (arXiv:2209.11895)",
        "mean",
    ),
    "null_mass": (
        "1",
        "weight on the learned sink",
        "mean over rows of the weight that goes to the head's learned sink logit, which has no key",
        "gpt-oss model card 2025 (arXiv:2508.10925)",
        "mean",
    ),
    "max_logit": ("1", "largest logit", "max over rows and keys of s_ij", _WORTSMAN, "extreme"),
    "min_logit": (
        "1",
        "smallest logit",
        "min over rows and visible keys of s_ij",
        "",
        "extreme",
    ),
    "max_abs_logit": (
        "1",
        "largest absolute logit",
        "max over rows and visible keys of |s_ij|",
        "",
        "extreme",
    ),
    "max_logit_query": (
        "index",
        "query of the largest logit",
        "index on the query axis of the row that holds max_logit",
        "",
        "extreme",
    ),
    "max_logit_key": (
        "index",
        "key of the largest logit",
        "index on the key axis of the column that holds max_logit",
        "",
        "extreme",
    ),
    "mean_logit": (
        "1",
        "mean logit",
        "mean over rows of the mean of s_ij over the visible keys",
        "",
        "mean",
    ),
    "logit_std": (
        "1",
        "spread of the logits within a row",
        "mean over rows of the standard deviation of s_ij over the visible keys; about 1 at "
        "initialisation",
        "",
        "mean",
    ),
    "log_sum_exp": ("1", "log-sum-exp", "mean over rows of ln Σ_j exp s_ij", "", "mean"),
}

# name: (units, long name, formula); row statistics kept with keep_rows, beyond those above.
MORE_ROWS: Final[dict[str, tuple[str, str, str]]] = {
    "sum_squares": ("1", "sum of squared weights", "Σ_j a_ij²"),
    "top_key": ("index", "key of the largest weight", "index on the key axis of argmax_j a_ij"),
    "var_logit": ("1", "variance of the logits", "variance of s_ij over the visible keys"),
}
NOT_PER_ROW: Final = ("dead_rows", "dead_rows_not_sink", "max_logit_query", "max_logit_key")

# name: (kind, units, long name, definition, source); dims (block,)
_RMS = "root mean square over tokens (without position 0) and width of "
_RMS_FIRST = "root mean square over position 0 of every document and width of "
PER_BLOCK: Final[dict[str, tuple[Kind, str, str, str, str]]] = {
    "stream_in_rms": ("float64", "1", "stream entering", _RMS + "the stream entering", ""),
    "stream_out_rms": ("float64", "1", "stream leaving", _RMS + "the stream leaving", ""),
    "stream_in_rms_first": (
        "float64",
        "1",
        "stream entering, first token",
        _RMS_FIRST + "the stream entering",
        _SUN,
    ),
    "stream_out_rms_first": (
        "float64",
        "1",
        "stream leaving, first token",
        _RMS_FIRST + "the stream leaving",
        _SUN,
    ),
    "stream_max_abs": (
        "float64",
        "1",
        "largest component of the stream",
        "max over tokens and width of |stream leaving|",
        _SUN,
    ),
    "attention_write_rms": (
        "float64",
        "1",
        "what attention writes",
        _RMS + "what the attention adds to the stream",
        "",
    ),
    "mlp_write_rms": (
        "float64",
        "1",
        "what the MLP writes",
        _RMS + "what the MLP adds to the stream",
        "",
    ),
    "attention_write_rms_first": (
        "float64",
        "1",
        "what attention writes, first token",
        _RMS_FIRST + "what the attention adds to the stream",
        _SUN,
    ),
    "mlp_write_rms_first": (
        "float64",
        "1",
        "what the MLP writes, first token",
        _RMS_FIRST + "what the MLP adds to the stream",
        _SUN,
    ),
    "writes_verified": (
        "bool",
        "1",
        "writes checked",
        "true: stream in + attention + MLP = stream out was checked; false: the two writes are "
        "the outputs of the modules",
        "",
    ),
    "stream_gradient_rms": (
        "float64",
        "nats per unit of the stream",
        "gradient of the loss with respect to the stream",
        "root mean square over tokens and width of ∂loss/∂(stream leaving)",
        "",
    ),
}

# name: (dims, kind, units, long name, definition, sampling)
MAPS: Final[dict[str, tuple[str, Kind, str, str, str, Sampling]]] = {
    "band_mass": (
        "layer head band",
        "float64",
        "1",
        "weight by distance",
        "mean over rows of the weight on keys at distance |i − j| in the band; a band reaches "
        "from its lower edge to the next one; self-attention only",
        "mean",
    ),
    "received": (
        "layer head key",
        "float32",
        "weights",
        "attention received",
        "Σ_i a_ij over all queries that exist",
        "mean",
    ),
    "received_visible": (
        "layer key",
        "int64",
        "rows",
        "queries that could see the key",
        "number of measured queries to which the key is visible",
        "measured",
    ),
    "pooled": (
        "layer head query_block key_block",
        "float32",
        "1",
        "pooled attention map",
        "mean over the rows of a query block of the weight on the keys of a key block; each "
        "row of the map that has rows sums to 1, less what goes to a learned sink",
        "mean",
    ),
    "pool_rows": (
        "layer query_block",
        "int64",
        "rows",
        "rows behind each row of the pooled map",
        "number of measured rows with a visible key in the query block",
        "measured",
    ),
    "profile_rows": (
        "layer position_bin",
        "int64",
        "rows",
        "rows behind each position bin",
        "number of measured rows with a visible key in the position bin",
        "measured",
    ),
    "rows": (
        "layer",
        "int64",
        "rows",
        "rows measured",
        "query rows, over batch and calls",
        "measured",
    ),
    "rows_empty": (
        "layer",
        "int64",
        "rows",
        "rows without a visible key",
        "of the measured rows; they are in no mean",
        "measured",
    ),
    "rows_total": (
        "layer",
        "int64",
        "rows",
        "rows that exist",
        "more than rows when sampled",
        "whole",
    ),
}
