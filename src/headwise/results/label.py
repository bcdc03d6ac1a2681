"""The one door from records to labelled data: ``to_dataset``.

Layers differ in heads, positions per bin and token streams; the data set has one of each. Missing
heads, bands, bins and keys are NaN. Bins and blocks of different widths are brought to the
smallest common width, means weighted by the rows behind them, so nothing is estimated. The token
streams stand one after the other on the ``key`` (and ``query``) axis.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headwise.errors import MeasurementError
from headwise.results.bins import coarser_map, coarser_means, coarser_rows
from headwise.results.records import PROFILED, QUANTILES, VALUES, LayerRecord, ScanRecord
from headwise.results.schema import COORDINATES, SCHEMA_VERSION, VARIABLES, Variable
from headwise.results.validate import check

__all__ = ["to_dataset"]

Arrays = dict[str, np.ndarray]


def to_dataset(record: ScanRecord) -> xr.Dataset:
    """The labelled data set of a scan, checked against the schema.

    Dimensions: ``layer head key band position_bin query_block key_block quantile`` and, where
    measured, ``query block parameter``. Every variable carries ``long_name``, ``units``,
    ``definition`` and ``exactness``; the facts of the run are the attribute ``about`` (JSON).
    """
    if not record.layers:
        raise MeasurementError("the scan holds no attention layer, so there is nothing to label")
    starts = _stream_starts(record)
    arrays: Arrays = {
        **_per_head(record, starts),
        **_distributions(record),
        **_maps(record, starts),
        **_kept_rows(record, starts),
        **_blocks(record),
        **_gradients(record),
    }
    coordinates = {**_layer_coordinates(record), **_axes(arrays, record), **_tokens(record, arrays)}
    exactness = _exactness(record)
    dataset = xr.Dataset(
        {name: _labelled(name, VARIABLES, arrays[name], exactness) for name in _ordered(arrays)},
        coords={name: _labelled(name, COORDINATES, v, None) for name, v in coordinates.items()},
        attrs={
            "schema_version": SCHEMA_VERSION,
            "about": json.dumps(dict(record.about), sort_keys=True),
        },
    )
    check(dataset)
    return dataset


def _ordered(arrays: Arrays) -> list[str]:
    """The names in the order of the schema, then the unknown ones, which ``_labelled`` refuses."""
    return [*(n for n in VARIABLES if n in arrays), *(n for n in arrays if n not in VARIABLES)]


def _labelled(
    name: str, table: dict[str, Variable], values: np.ndarray, exactness: dict[str, str] | None
) -> tuple[tuple[str, ...], np.ndarray, dict[str, str]]:
    if name not in table:
        raise MeasurementError(f"the record holds {name!r}, which is not in the schema")
    entry = table[name]
    attributes = {
        "long_name": entry.long_name,
        "units": entry.units,
        "definition": entry.definition,
        "source": entry.source,
    }
    if exactness is not None:
        attributes["exactness"] = exactness[entry.sampling]
    kind = object if entry.kind == "str" else entry.kind
    return entry.dims, values.astype(kind), {k: text for k, text in attributes.items() if text}


def _exactness(record: ScanRecord) -> dict[str, str]:
    rows = sum(layer.rows for layer in record.layers)
    total = sum(layer.rows_total for layer in record.layers)
    if rows >= total:
        return dict.fromkeys(("mean", "extreme", "quantile", "measured", "whole"), "exact")
    some = f"{rows:,} of {total:,} rows, each exact"
    return {
        "mean": f"unbiased estimate from {some}",
        "extreme": f"extreme over {some}: a bound on the extreme over all",
        "quantile": f"quantiles over {some}",
        "measured": "exact",
        "whole": "exact",
    }


def _stream_starts(record: ScanRecord) -> dict[str, int]:
    """Where each token stream begins on the key axis."""
    starts, start = {}, 0
    for stream in record.tokens:
        starts[stream.name] = start
        start += len(stream.ids)
    for layer in record.layers:
        for name in (layer.query_stream, layer.key_stream):
            if name not in starts:
                raise MeasurementError(
                    f"layer {layer.module} reads the token stream {name!r}, which the scan lacks"
                )
    return starts


def _per_head(record: ScanRecord, starts: dict[str, int]) -> Arrays:
    names = dict.fromkeys((*VALUES, *(name for layer in record.layers for name in layer.values)))
    heads = max(layer.heads for layer in record.layers)
    arrays = {
        name: _stack(
            [_of(layer, layer.values.get(name), name) for layer in record.layers], (heads,)
        )
        for name in names
    }
    for i, layer in enumerate(record.layers):
        arrays["max_logit_query"][i] += starts[layer.query_stream]
        arrays["max_logit_key"][i] += starts[layer.key_stream]
    return arrays


def _distributions(record: ScanRecord) -> Arrays:
    layers = record.layers
    heads = max(layer.heads for layer in layers)
    width = math.lcm(*(layer.bin_width for layer in layers))
    rows = [coarser_rows(layer.profile_rows, width // layer.bin_width) for layer in layers]
    bins = max(len(r) for r in rows)
    arrays: Arrays = {"profile_rows": _stack(rows, (bins,), fill=0)}
    for name in PROFILED:
        quantiles, profiles = [], []
        for layer in layers:
            quantiles.append(_of(layer, layer.quantiles.get(name), f"{name}_quantile"))
            profile = _of(layer, layer.profiles.get(name), f"{name}_profile")
            if profile is not None:
                counts = layer.profile_counts.get(name, layer.profile_rows)
                profile = coarser_means(profile, counts, width // layer.bin_width)
            profiles.append(profile)
        arrays[f"{name}_quantile"] = _stack(quantiles, (heads, len(QUANTILES)))
        arrays[f"{name}_profile"] = _stack(profiles, (heads, bins))
    return arrays


def _maps(record: ScanRecord, starts: dict[str, int]) -> Arrays:
    layers = record.layers
    heads = max(layer.heads for layer in layers)
    keys = sum(len(stream.ids) for stream in record.tokens)
    width = math.lcm(*(layer.pool_width for layer in layers))
    pooled = [
        coarser_map(_host(layer.pooled), layer.pool_rows, width // layer.pool_width)
        for layer in layers
    ]
    pool_rows = [coarser_rows(layer.pool_rows, width // layer.pool_width) for layer in layers]
    query_blocks, key_blocks = (max(p.shape[axis] for p in pooled) for axis in (1, 2))
    received = _stack([None] * len(layers), (heads, keys))
    visible = np.zeros((len(layers), keys), dtype=np.int64)
    for i, layer in enumerate(layers):
        at = _span(record, starts, layer.key_stream)
        received[i, : layer.heads, at] = _fitting(layer, "received", layer.received, at)
        visible[i, at] = _fitting(layer, "received_visible", layer.received_visible, at)
    bands = max(layer.bands.shape[-1] for layer in layers)
    return {
        "band_mass": _stack([_of(layer, layer.bands, "bands") for layer in layers], (heads, bands)),
        "received": received,
        "received_visible": visible,
        "pooled": _stack(pooled, (heads, query_blocks, key_blocks)),
        "pool_rows": _stack(pool_rows, (query_blocks,), fill=0),
        **{
            name: np.array([getattr(layer, name) for layer in layers])
            for name in ("rows", "rows_empty", "rows_total")
        },
    }


def _kept_rows(record: ScanRecord, starts: dict[str, int]) -> Arrays:
    names = dict.fromkeys(name for layer in record.layers for name in layer.row_values)
    heads = max(layer.heads for layer in record.layers)
    queries = sum(len(stream.ids) for stream in record.tokens)
    arrays = {}
    for name in names:
        rows = _stack([None] * len(record.layers), (heads, queries))
        for i, layer in enumerate(record.layers):
            if name in layer.row_values:
                at = _span(record, starts, layer.query_stream)
                values = _fitting(layer, f"{name}_rows", layer.row_values[name], at)
                shift = starts[layer.key_stream] if name == "top_key" else 0
                rows[i, : layer.heads, at] = values + shift
        arrays[f"{name}_rows"] = rows
    return arrays


def _blocks(record: ScanRecord) -> Arrays:
    if not record.blocks:
        return {}
    names = [name for name, entry in VARIABLES.items() if entry.dims == ("block",)]
    if all(block.stream_gradient_rms is None for block in record.blocks):
        names.remove("stream_gradient_rms")
    table = {name: [getattr(block, name) for block in record.blocks] for name in names}
    return {
        name: np.array([np.nan if value is None else value for value in values])
        for name, values in table.items()
    }


def _gradients(record: ScanRecord) -> Arrays:
    if not record.gradients:
        return {}
    return {
        "gradient_norm": np.array([g.norm for g in record.gradients]),
        "gradient_size": np.array([g.size for g in record.gradients]),
    }


def _layer_coordinates(record: ScanRecord) -> Arrays:
    layers = record.layers
    facts = ("module", "role", "number", "mask", "heads", "kv_heads", "scale")
    streams = ("query_stream", "key_stream")
    return {
        "layer": np.arange(len(layers)),
        **{
            name: np.array([getattr(layer, name) for layer in layers])
            for name in (*facts, *streams)
        },
        "window": np.array([np.nan if la.window is None else la.window for la in layers]),
        "non_finite": np.array([layer.non_finite or "" for layer in layers]),
    }


def _axes(arrays: Arrays, record: ScanRecord) -> Arrays:
    """The index coordinates of the dimensions that arise from binning."""
    bins = math.lcm(*(layer.bin_width for layer in record.layers))
    blocks = math.lcm(*(layer.pool_width for layer in record.layers))
    _, heads, query_blocks, key_blocks = arrays["pooled"].shape
    bands = arrays["band_mass"].shape[-1]
    return {
        "head": np.arange(heads),
        "quantile": np.array(QUANTILES),
        "band": np.array([0, *(2**b for b in range(bands - 1))][:bands]),
        "position_bin": np.arange(arrays["profile_rows"].shape[-1]) * bins,
        "query_block": np.arange(query_blocks) * blocks,
        "key_block": np.arange(key_blocks) * blocks,
    }


def _tokens(record: ScanRecord, arrays: Arrays) -> Arrays:
    streams = record.tokens
    columns: Arrays = {
        "token": np.array([_storable(t) for stream in streams for t in stream.texts], dtype=object),
        "token_id": np.concatenate([_host(stream.ids) for stream in streams]),
        "document": np.concatenate([_host(stream.document) for stream in streams]),
        "position": np.concatenate([_host(stream.position) for stream in streams]),
        "stream": np.array([s.name for s in streams for _ in range(len(s.ids))], dtype=object),
    }
    coordinates: Arrays = {"key": np.arange(len(columns["token_id"])), **columns}
    if any(name.endswith("_rows") and VARIABLES[name].dims[-1] == "query" for name in arrays):
        coordinates["query"] = coordinates["key"]
        coordinates |= {f"row_{name}": values for name, values in columns.items()}
    if record.blocks:
        coordinates["block"] = np.arange(len(record.blocks))
        coordinates["block_module"] = np.array([block.module for block in record.blocks])
        coordinates["stack"] = np.array([block.stack for block in record.blocks])
        coordinates["block_number"] = np.array([block.number for block in record.blocks])
    if record.gradients:
        gradients = record.gradients
        coordinates["parameter"] = np.array([g.parameter for g in gradients], dtype=object)
        coordinates["parameter_block"] = np.array(
            [-1 if g.block is None else g.block for g in gradients]
        )
        coordinates["projection"] = np.array([g.projection for g in gradients], dtype=object)
    return coordinates


def _storable(text: str) -> str:
    """A token's text as UTF-8 can hold it and files can store it: no NUL, no lone surrogate."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", "␀")


def _span(record: ScanRecord, starts: dict[str, int], name: str) -> slice:
    length = next(len(stream.ids) for stream in record.tokens if stream.name == name)
    return slice(starts[name], starts[name] + length)


def _fitting(layer: LayerRecord, name: str, values: Tensor, at: slice) -> np.ndarray:
    length = at.stop - at.start
    if values.shape[-1] != length:
        raise MeasurementError(
            f"{name} of layer {layer.module} has {values.shape[-1]} positions, "
            f"but its token stream has {length}"
        )
    return _host(values)


def _of(layer: LayerRecord, values: Tensor | None, name: str) -> np.ndarray | None:
    if values is not None and values.shape[0] != layer.heads:
        raise MeasurementError(
            f"{name} of layer {layer.module} has shape {tuple(values.shape)}, "
            f"but the layer has {layer.heads} heads"
        )
    return None if values is None else _host(values)


def _host(values: Tensor) -> np.ndarray:
    """A NumPy copy; half precision, which NumPy lacks, is widened explicitly."""
    values = values.detach().cpu()
    return (values.to(torch.float64) if values.is_floating_point() else values).numpy()


def _stack(
    parts: Sequence[np.ndarray | None], shape: tuple[int, ...], fill: float = np.nan
) -> np.ndarray:
    """Arrays of one rank, each laid into the leading corner of a filled array ``layer *shape``."""
    out = np.full((len(parts), *shape), fill)
    for i, part in enumerate(parts):
        if part is not None:
            out[i][tuple(slice(size) for size in part.shape)] = part
    return out
