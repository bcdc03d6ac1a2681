"""What a measurement leaves behind: frozen records of tensors, no labels and no files.

One scan is a ``ScanRecord``: a ``LayerRecord`` per attention module, a ``BlockRecord`` per
transformer block, the tokens that were read, the gradients when they were asked for, and facts
about the run. ``label.to_dataset`` is the only door from here to labelled data.

Letters in the shapes: H query heads of that module, T tokens of a stream, Q quantiles, P position
bins, G pooled blocks, nb distance bands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor

__all__ = [
    "PROFILED",
    "PROJECTIONS",
    "QUANTILES",
    "ROLES",
    "STREAMS",
    "VALUES",
    "BlockRecord",
    "GradientRecord",
    "LayerRecord",
    "ScanRecord",
    "TokenStream",
]

STREAMS: Final = ("text", "source", "target")
ROLES: Final = ("decoder", "encoder", "cross")
PROJECTIONS: Final = ("q", "k", "v", "o", "qkv", "mlp", "norm", "embedding", "other")

# The quantiles over the measured rows that every scan records.
QUANTILES: Final = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)

# One number per head (keys of LayerRecord.values); the definitions are in schema.py.
VALUES: Final = (
    "entropy",
    "entropy_fraction",
    "entropy_without_sink",
    "entropy_without_sink_fraction",
    "effective_keys",
    "jacobian_trace",
    "top_weight",
    "dead_rows",
    "dead_rows_not_sink",
    "distance",
    "sink_mass",
    "self_mass",
    "previous_mass",
    "null_mass",
    "max_logit",
    "min_logit",
    "max_abs_logit",
    "max_logit_query",
    "max_logit_key",
    "mean_logit",
    "logit_std",
    "log_sum_exp",
)

# Those with quantiles over rows and a profile over positions.
PROFILED: Final = (
    "entropy",
    "entropy_fraction",
    "entropy_without_sink",
    "effective_keys",
    "jacobian_trace",
    "top_weight",
    "distance",
    "sink_mass",
    "previous_mass",
    "max_logit",
    "logit_std",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStream:
    """The tokens one stack reads: the text, or the source and the target of an encoder-decoder.

    Several documents stand one after the other; ``position`` starts again at 0 in each.
    """

    name: str  # one of STREAMS
    texts: tuple[str, ...]  # one string per token; empty strings when there is no tokenizer
    ids: Tensor  # (T,) int64
    document: Tensor  # (T,) int64
    position: Tensor  # (T,) int64, within its document


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerRecord:
    """The reductions over all measured rows of one attention module, float64."""

    module: str  # its path in the model
    role: str  # one of ROLES: causal self-attention, encoder self-attention, cross-attention
    number: int  # within its stack
    heads: int
    kv_heads: int
    mask: str  # in words
    query_stream: str  # names of token streams
    key_stream: str
    scale: float
    window: int | None
    rows: int  # measured
    rows_empty: int  # of those: no visible key
    rows_total: int  # that exist; more than ``rows`` when sampled
    values: Mapping[str, Tensor]  # VALUES -> (H,); NaN where the statistic does not exist
    quantiles: Mapping[str, Tensor]  # PROFILED -> (H, Q) at QUANTILES
    profiles: Mapping[str, Tensor]  # PROFILED -> (H, P), means per position bin
    profile_rows: Tensor  # (P,) rows behind each mean
    bin_width: int  # positions per bin
    # (P,) rows behind a profile where they differ from profile_rows (a share of ln(visible keys)
    # does not exist for rows with one visible key); needed to bring bins to one width exactly.
    profile_counts: Mapping[str, Tensor] = field(default_factory=dict)
    bands: Tensor  # (H, nb) mean mass per distance band
    received: Tensor  # (H, T) sum of weights received, over the key stream
    received_visible: Tensor  # (T,) measured queries that could see the key
    pooled: Tensor  # (H, G, G) mean mass per row; each block row that has rows sums to 1
    pool_rows: Tensor  # (G,) query rows behind each block row
    pool_width: int  # positions per block
    row_values: Mapping[str, Tensor] = field(default_factory=dict)  # name -> (H, T) per query row
    non_finite: str | None = None  # why the layer's values are NaN


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockRecord:
    """The residual stream around one transformer block; root mean squares over tokens and width.

    ``*_first`` are of position 0 of each document; the plain ones leave that position out, since a
    massive first token would hide the rest.
    """

    module: str
    stack: str  # "decoder" or "encoder"
    number: int
    stream_in_rms: float
    stream_out_rms: float
    stream_in_rms_first: float
    stream_out_rms_first: float
    stream_max_abs: float  # largest |component| of the stream leaving the block
    attention_write_rms: float
    mlp_write_rms: float
    attention_write_rms_first: float
    mlp_write_rms_first: float
    writes_verified: bool  # in + attention + mlp == out was checked; else the modules' outputs
    stream_gradient_rms: float | None = None  # None: gradients were not asked for


@dataclass(frozen=True, kw_only=True, eq=False)
class GradientRecord:
    """The gradient of the mean loss with respect to one parameter: its Euclidean norm."""

    parameter: str
    block: int | None
    projection: str  # one of PROJECTIONS
    norm: float
    size: int  # number of elements


@dataclass(frozen=True, kw_only=True, eq=False)
class ScanRecord:
    """One measurement of one model: everything that is saved, labelled and reported.

    ``about`` holds facts of the run: model, architecture, tokens, documents, dtype, computed_dtype,
    exactness, rows_measured, rows_total, sink_keys, seconds, cpu_seconds, peak_memory_bytes,
    versions, created_at, command, device, context, interrupted, notes, and loss with gradients.
    """

    layers: tuple[LayerRecord, ...]
    blocks: tuple[BlockRecord, ...] = ()
    tokens: tuple[TokenStream, ...] = ()
    gradients: tuple[GradientRecord, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
