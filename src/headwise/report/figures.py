"""The data behind every figure of the page: small facts as JSON, arrays packed by ``embed``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xarray as xr

from headwise.report.choices import CIRCUIT_STATISTICS, DERIVED_WORDS, FLOW, STATISTICS
from headwise.report.circuit_figures import circuit_arrays, circuit_facts
from headwise.report.embed import Packed, pack_coarse, pack_exact, pack_half, pack_text
from headwise.report.quantities import derived, layer_names
from headwise.report.run import definition_in_words
from headwise.report.tokens import shown

__all__ = ["Figures", "figures", "only_circuits"]

# Numbers per array that the page can afford; longer texts share a number between neighbours.
_RECEIVED_PER_HEAD: Final = 2_400_000
_RECEIVED_PER_LAYER: Final = 600_000
_RECEIVED_OF_MODEL: Final = 1_000_000
_MAP_CELLS: Final = 1_300_000

_PROFILES: Final = ("entropy", "entropy_without_sink")
_QUANTILES: Final = (
    "entropy",
    "entropy_without_sink",
    "effective_keys",
    "top_weight",
    "distance",
    "sink_mass",
    "previous_mass",
    "max_logit",
    "logit_std",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What the page draws."""

    facts: dict[str, Any]
    arrays: dict[str, Packed]


def figures(dataset: xr.Dataset) -> Figures:
    """Facts and packed arrays for every figure; a few megabytes whatever the length of the text."""
    statistics, table = _tables(dataset)
    streams = _streams(dataset)
    labels = [
        shown(str(text), int(number))
        for text, number in zip(dataset["token"].values, dataset["token_id"].values, strict=True)
    ]
    received, widths = _received(dataset, streams)
    pooled, block_width = _pooled(dataset)
    facts = {
        "layers": _layers(dataset),
        "heads": [int(head) for head in dataset["head"].values],
        "statistics": statistics,
        "streams": streams,
        "hasText": any(str(text) for text in dataset["token"].values),
        "tokens": len(labels),
        "bands": [int(edge) for edge in dataset["band"].values],
        "bins": [int(start) for start in dataset["position_bin"].values],
        "quantiles": [float(level) for level in dataset["quantile"].values],
        "quantileNames": [name for name in _QUANTILES if f"{name}_quantile" in dataset],
        "blocks": pooled.shape[-2:],
        "blockWidth": block_width,
        "receivedWidths": widths,
        "depth": _depth(dataset),
        "gradients": _gradients(dataset),
        "circuits": circuit_facts(dataset),
    }
    quantiles = [dataset[f"{k}_quantile"].values for k in _QUANTILES if f"{k}_quantile" in dataset]
    arrays = {
        "table": pack_exact(table),
        "profiles": pack_half(np.stack([dataset[f"{k}_profile"].values for k in _PROFILES])),
        "quantiles": pack_exact(np.stack(quantiles)),
        "band": pack_half(dataset["band_mass"].values),
        "pooled": pack_half(pooled),
        "tokens": pack_text(labels),
        **received,
        **circuit_arrays(dataset),
    }
    return Figures(facts=facts, arrays=arrays)


def only_circuits(dataset: xr.Dataset) -> Figures:
    """The same of a set of circuits alone: no text was read."""
    statistics, table = _tables(dataset)
    return Figures(
        facts={
            "layers": _layers(dataset),
            "heads": [int(head) for head in dataset["head"].values],
            "statistics": statistics,
            "streams": [],
            "findings": {},
            "roles": {},
            "depth": None,
            "gradients": None,
            "circuits": circuit_facts(dataset),
        },
        arrays={"table": pack_exact(table), **circuit_arrays(dataset)},
    )


def _tables(dataset: xr.Dataset) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The choices of the plate that hold any number, and their (statistic, layer, head) table."""
    rows: list[np.ndarray] = []
    entries: list[dict[str, Any]] = []
    shape = (dataset.sizes["layer"], dataset.sizes["head"])
    for statistic in (*STATISTICS, *CIRCUIT_STATISTICS, *FLOW):
        per_layer = statistic.group == "Flow"
        source = "band_mass" if statistic.name == "local_mass" else statistic.name
        if source not in dataset:
            continue
        if per_layer:
            values = np.broadcast_to(_by_layer(dataset, statistic.name)[:, None], shape)
        else:
            values = derived(dataset, statistic.name).transpose("layer", "head").values
        if not np.isfinite(values).any() or (
            statistic.name == "null_mass" and not np.nansum(values)
        ):
            continue
        attributes = dataset[source].attrs
        words = DERIVED_WORDS.get(
            statistic.name,
            (attributes.get("long_name", ""), definition_in_words(dataset, source)),
        )
        rows.append(values)
        entries.append(
            {
                "name": statistic.name,
                "group": statistic.group,
                "label": statistic.label,
                "unit": statistic.unit,
                "scale": statistic.scale,
                "share": statistic.share,
                "perLayer": per_layer,
                "longName": words[0],
                "definition": words[1],
                "reading": statistic.reading,
            }
        )
    return entries, np.stack(rows) if rows else np.zeros((0, *shape))


def _by_layer(dataset: xr.Dataset, name: str) -> np.ndarray:
    """A number per block brought to the layers that belong to it; cross-attention has none."""
    values = {
        (str(stack), int(number)): float(value)
        for stack, number, value in zip(
            dataset["stack"].values,
            dataset["block_number"].values,
            dataset[name].values,
            strict=True,
        )
    }
    keys = zip(dataset["role"].values, dataset["number"].values, strict=True)
    return np.array([values.get((str(role), int(number)), math.nan) for role, number in keys])


def _layers(dataset: xr.Dataset) -> list[dict[str, Any]]:
    rows = []
    for i, name in enumerate(layer_names(dataset)):
        row = dataset.isel(layer=i).coords
        entry = {
            "name": name,
            "id": int(row["layer"]),
            "role": str(row["role"].values),
            "module": str(row["module"].values),
            "heads": int(row["heads"]),
            "kvHeads": int(row["kv_heads"]),
        }
        for key, source in _OF_TEXT.items():
            entry[key] = str(row[source].values) if source in row else ""
        window = float(row["window"]) if "window" in row else math.nan
        rows.append({**entry, "window": None if math.isnan(window) else int(window)})
    return rows


_OF_TEXT: Final = {
    "mask": "mask",
    "nonFinite": "non_finite",
    "queryStream": "query_stream",
    "keyStream": "key_stream",
}


def _streams(dataset: xr.Dataset) -> list[dict[str, Any]]:
    names = dataset["stream"].values.astype(str)
    documents, positions = dataset["document"].values, dataset["position"].values
    streams = []
    for name in dict.fromkeys(names.tolist()):
        at = np.flatnonzero(names == name)
        starts = np.flatnonzero(np.diff(documents[at], prepend=documents[at[0]] - 1))
        streams.append(
            {
                "name": str(name),
                "start": int(at[0]),
                "length": len(at),
                "documents": [int(start) for start in starts],
                "longest": int(positions[at].max()) + 1,
            }
        )
    return streams


def _received(
    dataset: xr.Dataset, streams: Sequence[dict[str, Any]]
) -> tuple[dict[str, Packed], dict[str, int]]:
    """Share of all weights that a token receives: per head, per layer, for the whole model."""
    measured = dataset["rows"].where(dataset["rows"] > 0)
    rows = (dataset["rows_total"] * (1 - dataset["rows_empty"] / measured)).values
    total = dataset["received"].transpose("layer", "head", "key").values
    count, heads = sum(stream["length"] for stream in streams), total.shape[0] * total.shape[1]
    widths = {
        name: max(1, math.ceil(count / max(room, 64)))
        for name, room in (
            ("receivedHead", _RECEIVED_PER_HEAD // heads),
            ("receivedLayer", _RECEIVED_PER_LAYER // total.shape[0]),
            ("receivedModel", _RECEIVED_OF_MODEL),
        )
    }
    per_head, per_layer = [], []
    for layer, queries in zip(total, rows, strict=True):  # one at a time: this is the largest array
        shares = layer / np.float32(queries) if queries > 0 else np.full_like(layer, np.nan)
        per_head.append(_binned(shares, widths["receivedHead"], streams))
        per_layer.append(_mean(shares, 0))
    whole = _mean(np.stack(per_layer), 0)
    return {
        "receivedHead": pack_coarse(np.stack(per_head)),
        "receivedLayer": pack_half(
            np.stack([_binned(line, widths["receivedLayer"], streams) for line in per_layer])
        ),
        "receivedModel": pack_half(_binned(whole, widths["receivedModel"], streams)),
    }, widths


def _binned(values: np.ndarray, width: int, streams: Sequence[dict[str, Any]]) -> np.ndarray:
    """Means of ``width`` neighbours along the last axis, stream by stream."""
    parts = []
    for stream in streams if width > 1 else ():
        part = values[..., stream["start"] : stream["start"] + stream["length"]]
        spread = [(0, 0)] * (part.ndim - 1) + [(0, -part.shape[-1] % width)]
        padded = np.pad(part, spread, constant_values=np.nan)
        parts.append(_mean(padded.reshape(*part.shape[:-1], -1, width), -1))
    return np.concatenate(parts, axis=-1) if parts else values


def _mean(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean of what is there; NaN where nothing is."""
    there = np.isfinite(values)
    count = there.sum(axis)
    total = np.where(there, values, 0).sum(axis, dtype=np.float64)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def _pooled(dataset: xr.Dataset) -> tuple[np.ndarray, int]:
    """The pooled maps, blocks joined until all heads fit into the page."""
    maps = dataset["pooled"].transpose("layer", "head", "query_block", "key_block").values
    starts = dataset["query_block"].values
    width = int(starts[1] - starts[0]) if len(starts) > 1 else max(dataset.sizes["key"], 1)
    rows = dataset["pool_rows"].transpose("layer", "query_block").values.astype(np.float64)
    while maps.size > _MAP_CELLS and maps.shape[-1] > 8:
        maps, rows, width = *_halved(maps, rows), width * 2
    return maps, width


def _halved(maps: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    spread = [(0, 0), (0, 0), (0, maps.shape[2] % 2), (0, maps.shape[3] % 2)]
    padded = np.pad(maps, spread)
    weights = np.pad(rows, [(0, 0), (0, maps.shape[2] % 2)])
    columns = padded.reshape(*padded.shape[:3], -1, 2).sum(-1)
    pairs = weights.reshape(len(rows), 1, -1, 2, 1)
    summed = np.nansum(columns.reshape(*columns.shape[:2], -1, 2, columns.shape[-1]) * pairs, 3)
    count = pairs.sum(3)
    known = np.broadcast_to(count > 0, summed.shape)
    joined = np.divide(summed, count, out=np.full(summed.shape, np.nan), where=known)
    return joined, weights.reshape(len(rows), -1, 2).sum(-1)


def _depth(dataset: xr.Dataset) -> dict[str, Any] | None:
    if "stream_out_rms" not in dataset:
        return None
    names = [str(name) for name in dataset.data_vars if dataset[name].dims == ("block",)]
    return {
        "stacks": [str(stack) for stack in dataset["stack"].values],
        "numbers": [int(number) for number in dataset["block_number"].values],
        "verified": bool(dataset["writes_verified"].values.all()),
        "values": {
            name: [_or_none(v) for v in dataset[name].values.astype(np.float64)] for name in names
        },
    }


def _gradients(dataset: xr.Dataset) -> list[dict[str, Any]] | None:
    """Norm by block and projection: the root of the summed squares of its parameters."""
    if "gradient_norm" not in dataset:
        return None
    squares: dict[str, dict[int, float]] = {}
    columns = ("projection", "parameter_block", "gradient_norm")
    for kind, block, norm in zip(*(dataset[name].values for name in columns), strict=True):
        if block >= 0:
            line = squares.setdefault(str(kind), {})
            line[int(block)] = line.get(int(block), 0.0) + float(norm) ** 2
    return [
        {"projection": kind, "points": [[b, _or_none(math.sqrt(s))] for b, s in line.items()]}
        for kind, line in squares.items()
    ]


def _or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
