"""The glossary: the words for axes, used by every signature, docstring, einsum and data set.

Tensors of heads are always laid out ``batch head position dim``. The letters q, k, v, A and W_Q
stay letters, since they are the field's own names; every axis is a word from this table.
"""

from __future__ import annotations

from typing import Final

__all__ = ["AXES"]

AXES: Final[dict[str, str]] = {
    "batch": "sequences computed side by side",
    "layer": "attention modules in the order in which the model calls them",
    "head": "query heads of one attention module",
    "kv_head": "key-value heads; query head h reads kv head h // (heads / kv_heads)",
    "query": "positions that attend (rows of the attention matrix)",
    "key": "positions attended to (columns of the attention matrix)",
    "d_model": "width of the residual stream",
    "d_head": "width of one head's queries and keys (d_k)",
    "d_value": "width of one head's values (d_v)",
    "d_ff": "hidden width of the feed-forward layer",
    "vocab": "entries of the vocabulary",
    "band": "distance bands: 0, then [1, 2), [2, 4), [4, 8), … tokens",
    "block": "transformer blocks in the order in which the model calls them",
    "position_bin": "runs of neighbouring positions, equally long",
    "query_block": "rows of a pooled attention map",
    "key_block": "columns of a pooled attention map",
    "quantile": "quantiles over the measured rows",
    "rank": "singular values of a head's matrix, the largest first",
    "earlier_layer": "attention modules that write what a later one reads",
    "earlier_head": "heads of those modules",
    "pair": "pairs of a head's entries that a rotation turns together",
    "offset": "distances from a query back to its key",
}
