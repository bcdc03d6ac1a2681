"""The published schema of a scan: every dimension, coordinate and variable of the data set.

The table below is the whole truth: ``label`` fills it, ``validate`` checks against it, the page
prints its definitions, and docs/schema.md is generated from it.

The words of the definitions are in ``definitions``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from headwise.axes import AXES
from headwise.results.circuit_definitions import CIRCUITS
from headwise.results.definitions import (
    MAPS,
    MORE_ROWS,
    NOT_PER_ROW,
    PER_BLOCK,
    PER_HEAD,
    Kind,
    Sampling,
)
from headwise.results.records import PROFILED, VALUES

__all__ = [
    "CIRCUIT_COORDINATES",
    "COORDINATES",
    "DIMENSIONS",
    "SCHEMA_VERSION",
    "VARIABLES",
    "Variable",
]

SCHEMA_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One row of the schema."""

    dims: tuple[str, ...]
    kind: Kind
    units: str
    long_name: str
    definition: str
    source: str = ""
    sampling: Sampling = "whole"
    required: bool = True


DIMENSIONS: Final[dict[str, str]] = {
    **{
        name: AXES[name]
        for name in (
            "layer",
            "head",
            "query",
            "key",
            "band",
            "position_bin",
            "query_block",
            "key_block",
            "quantile",
            "block",
        )
    },
    "parameter": "parameters of the model whose gradients were measured",
    **{name: AXES[name] for name in ("rank", "earlier_layer", "earlier_head", "pair", "offset")},
}

_LAYER_HEAD = ("layer", "head")


def _per_head() -> dict[str, Variable]:
    table = {}
    for name in VALUES:
        units, long_name, definition, source, sampling = PER_HEAD[name]
        table[name] = Variable(
            dims=_LAYER_HEAD,
            kind="float64",
            units=units,
            long_name=long_name,
            definition=definition,
            source=source,
            sampling=sampling,
        )
    return table


def _distributions() -> dict[str, Variable]:
    table = {}
    for name in PROFILED:
        units, long_name, definition, source, _ = PER_HEAD[name]
        row = _of_one_row(definition)
        table[f"{name}_quantile"] = Variable(
            dims=(*_LAYER_HEAD, "quantile"),
            kind="float64",
            units=units,
            long_name=f"{long_name}: quantiles",
            definition=f"quantiles over rows of: {row}",
            source=source,
            sampling="quantile",
        )
        table[f"{name}_profile"] = Variable(
            dims=(*_LAYER_HEAD, "position_bin"),
            kind="float64",
            units=units,
            long_name=f"{long_name}: by position",
            definition=f"mean over the rows of each position bin of: {row}",
            source=source,
            sampling="mean",
        )
    return table


def _kept_rows() -> dict[str, Variable]:
    names = {
        name: (entry[0], entry[1], _of_one_row(entry[2]))
        for name, entry in PER_HEAD.items()
        if name not in NOT_PER_ROW
    }
    return {
        f"{name}_rows": Variable(
            dims=(*_LAYER_HEAD, "query"),
            kind="float32",
            units=units,
            long_name=f"{long_name}: every row",
            definition=f"per query row: {definition}; NaN where the row was not measured",
            required=False,
        )
        for name, (units, long_name, definition) in {**names, **MORE_ROWS}.items()
    }


def _of_one_row(definition: str) -> str:
    """The formula of a single row, from the one of the mean or extreme over rows."""
    one = re.sub(r"^mean over rows(?: with .*?)? of ", "", definition)
    return one.replace("over rows and ", "over ")


def _per_block() -> dict[str, Variable]:
    return {
        name: Variable(
            dims=("block",),
            kind=kind,
            units=units,
            long_name=f"{long_name} the block" if long_name.endswith("ing") else long_name,
            definition=f"{definition} the block" if definition.endswith("ing") else definition,
            source=source,
            required=False,
        )
        for name, (kind, units, long_name, definition, source) in PER_BLOCK.items()
    }


def _maps() -> dict[str, Variable]:
    return {
        name: Variable(
            dims=tuple(dims.split()),
            kind=kind,
            units=units,
            long_name=long_name,
            definition=definition,
            sampling=sampling,
        )
        for name, (dims, kind, units, long_name, definition, sampling) in MAPS.items()
    }


def _gradients() -> dict[str, Variable]:
    return {
        "gradient_norm": Variable(
            dims=("parameter",),
            kind="float64",
            units="nats",
            long_name="gradient norm",
            definition="Euclidean norm of ∂(mean loss)/∂(parameter)",
            required=False,
        ),
        "gradient_size": Variable(
            dims=("parameter",),
            kind="int64",
            units="1",
            long_name="size of the parameter",
            definition="number of elements",
            required=False,
        ),
    }


def _circuits() -> dict[str, Variable]:
    return {
        name: Variable(
            dims=entry.dims,
            kind=entry.kind,
            units=entry.units,
            long_name=entry.long_name,
            definition=entry.definition,
            source=entry.source,
            required=False,
        )
        for name, entry in CIRCUITS.items()
    }


VARIABLES: Final[dict[str, Variable]] = {
    **_per_head(),
    **_distributions(),
    **_maps(),
    **_kept_rows(),
    **_per_block(),
    **_gradients(),
    **_circuits(),
}


_OF_CIRCUITS: Final[tuple[tuple[str, str, Kind, str, bool], ...]] = (
    ("qk_form", "layer", "str", "why logits are no fixed form; empty: they are", False),
    ("ov_form", "layer", "str", "why W_OV is exact up to a factor only; empty: exact", False),
    ("rank", "rank", "int64", "number of the singular value, the largest is 0", False),
    ("pair", "pair", "int64", "number of the pair, the fastest is 0", False),
    ("offset", "offset", "int64", "tokens from the query back to the key", False),
    ("earlier_layer", "earlier_layer", "int64", "layer of the earlier head", False),
    ("earlier_head", "earlier_head", "int64", "number of the earlier head", False),
)


def _coordinates() -> dict[str, Variable]:
    # name, dims, kind, long name, required
    table: tuple[tuple[str, str, Kind, str, bool], ...] = (
        ("layer", "layer", "int64", "attention module, in call order", True),
        ("module", "layer", "str", "path of the attention module in the model", True),
        ("role", "layer", "str", "decoder (causal self), encoder (self) or cross", True),
        ("number", "layer", "int64", "number of the layer within its stack", True),
        ("mask", "layer", "str", "the mask in words", True),
        ("heads", "layer", "int64", "query heads of the layer", True),
        ("kv_heads", "layer", "int64", "key-value heads of the layer", True),
        ("scale", "layer", "float64", "factor on q·k", True),
        ("window", "layer", "float64", "keys in the sliding window; NaN: none", True),
        ("query_stream", "layer", "str", "token stream of the queries", True),
        ("key_stream", "layer", "str", "token stream of the keys", True),
        ("non_finite", "layer", "str", "why the layer is NaN; empty: it is not", True),
        ("head", "head", "int64", "query head", True),
        ("quantile", "quantile", "float64", "quantile level", True),
        ("band", "band", "int64", "lower edge of the distance band", True),
        ("position_bin", "position_bin", "int64", "first position of the bin", True),
        ("query_block", "query_block", "int64", "first query position of the block", True),
        ("key_block", "key_block", "int64", "first key position of the block", True),
        ("key", "key", "int64", "index of the token; the streams stand one after the other", True),
        ("token", "key", "str", "text of the token; empty: no tokenizer", True),
        ("token_id", "key", "int64", "number of the token in the vocabulary", True),
        ("document", "key", "int64", "document of the token", True),
        ("position", "key", "int64", "position within the document", True),
        ("stream", "key", "str", "token stream: text, source or target", True),
        ("query", "query", "int64", "index of the token, as on key", False),
        ("row_token", "query", "str", "text of the query's token", False),
        ("row_token_id", "query", "int64", "number of the query's token", False),
        ("row_document", "query", "int64", "document of the query", False),
        ("row_position", "query", "int64", "position of the query within the document", False),
        ("row_stream", "query", "str", "token stream of the query", False),
        ("block", "block", "int64", "transformer block, in call order", False),
        ("block_module", "block", "str", "path of the block in the model", False),
        ("stack", "block", "str", "decoder or encoder", False),
        ("block_number", "block", "int64", "number of the block within its stack", False),
        ("parameter", "parameter", "str", "name of the parameter", False),
        ("parameter_block", "parameter", "int64", "its block; −1: outside the blocks", False),
        ("projection", "parameter", "str", "what the parameter projects", False),
        *_OF_CIRCUITS,
    )
    return {
        name: Variable(
            dims=(dim,), kind=kind, units="", long_name=text, definition="", required=required
        )
        for name, dim, kind, text, required in table
    }


COORDINATES: Final[dict[str, Variable]] = _coordinates()

# What a set of circuits alone has to have.
CIRCUIT_COORDINATES: Final = ("layer", "head", "module", "role", "number", "heads", "kv_heads")
