"""The door from numbers to labelled circuits, and from there into the data set of a scan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from headwise.circuits.behaviour import BEHAVIOURS, HeadLabels
from headwise.circuits.layer_weights import LayerWeights
from headwise.circuits.measures import ov_form, qk_form
from headwise.circuits.text_reader import TextCircuits
from headwise.results.circuit_definitions import BEHAVIOUR_PREFIX, CIRCUITS, TEXT_PREFIX
from headwise.results.schema import COORDINATES, SCHEMA_VERSION
from headwise.results.validate import about, check

__all__ = ["joined", "labelled"]

_PER_LAYER = ("qk_form", "ov_form")
_CHANCE = ("induction", "duplicate_token")
_INDICES = ("rank", "pair", "offset", "earlier_head")


def labelled(
    layers: Sequence[LayerWeights],
    numbers: Sequence[Mapping[str, Tensor]],
    tables: Mapping[str, Tensor],
    labels: HeadLabels | None,
    on_text: TextCircuits | None,
    distances: Sequence[int],
    facts: Mapping[str, Any],
) -> xr.Dataset:
    """The data set, checked against the schema; what a layer does not have is NaN."""
    coordinates = _coordinates(layers, distances)
    sizes = {name: len(values) for name, values in coordinates.items()}
    arrays = _stacked(numbers, sizes)
    arrays |= {name: table.cpu().numpy() for name, table in tables.items()}
    if labels is not None:
        arrays |= _behaviours(layers, labels, sizes["head"], BEHAVIOUR_PREFIX, "behaviours")
    if on_text is not None:
        arrays |= _on_text(layers, on_text, sizes)
    dataset = xr.Dataset(
        {name: _variable(name, arrays[name]) for name in CIRCUITS if name in arrays},
        coords={
            name: (COORDINATES[name].dims, values, {"long_name": COORDINATES[name].long_name})
            for name, values in coordinates.items()
        },
        attrs={
            "schema_version": SCHEMA_VERSION,
            "holds": "circuits",
            "about": json.dumps(dict(facts), sort_keys=True),
        },
    )
    check(dataset)
    return dataset


def joined(scan: xr.Dataset, found: xr.Dataset) -> xr.Dataset:
    """The data set of a scan with circuits in it, matched by module; other layers are NaN."""
    modules = [str(name) for name in found["module"].to_numpy()]
    wanted = [str(name) for name in scan["module"].to_numpy()]
    at = [modules.index(name) if name in modules else -1 for name in wanted]
    heads = [h if h < found.sizes["head"] else -1 for h in range(scan.sizes["head"])]
    places = {"layer": at, "head": heads, "earlier_layer": at}
    added = {
        str(name): (array.dims, _picked(array, places), array.attrs)
        for name, array in found.data_vars.items()
    }
    coordinates = {name: found[name].variable for name in _INDICES if name in found.coords}
    long_name = {"long_name": COORDINATES["earlier_layer"].long_name}
    coordinates["earlier_layer"] = xr.Variable("earlier_layer", scan["layer"].to_numpy(), long_name)
    for name in _PER_LAYER:
        coordinates[name] = xr.Variable("layer", _picked(found[name], places), found[name].attrs)
    whole = scan.assign(added).assign_coords(coordinates)
    facts = {**about(scan), "circuits": about(found)}
    whole.attrs["about"] = json.dumps(facts, sort_keys=True)
    check(whole)
    return whole


def _picked(array: xr.DataArray, places: Mapping[str, Sequence[int]]) -> np.ndarray:
    """The array at the places along each axis; where a place is −1, NaN or the empty text."""
    values = array.to_numpy()
    for axis, dim in enumerate(array.dims):
        if str(dim) in places:
            chosen = np.array(places[str(dim)])
            values = np.take(values, chosen.clip(0), axis)
            missing = np.flatnonzero(chosen < 0)
            values[(slice(None),) * axis + (missing,)] = "" if values.dtype == object else np.nan
    return values


def _coordinates(layers: Sequence[LayerWeights], distances: Sequence[int]) -> dict[str, np.ndarray]:
    heads = max(layer.heads for layer in layers)
    rank = max(max(layer.qk().values, layer.ov().values) for layer in layers)
    pairs = max(0 if la.rotary is None else la.rotary.inv_freq.numel() for la in layers)
    texts = {
        "module": [layer.module for layer in layers],
        "role": [layer.role for layer in layers],
        "qk_form": [qk_form(layer) for layer in layers],
        "ov_form": [ov_form(layer) for layer in layers],
    }
    return {
        "layer": np.arange(len(layers)),
        **{name: np.array(words, object) for name, words in texts.items()},
        "number": np.array([layer.number for layer in layers]),
        "heads": np.array([layer.heads for layer in layers]),
        "kv_heads": np.array([layer.kv_heads for layer in layers]),
        "scale": np.array([float(layer.scale) for layer in layers]),
        "head": np.arange(heads),
        "rank": np.arange(rank),
        **({"pair": np.arange(pairs), "offset": np.array(distances)} if pairs else {}),
        "earlier_layer": np.arange(len(layers)),
        "earlier_head": np.arange(heads),
    }


def _stacked(
    numbers: Sequence[Mapping[str, Tensor]], sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """One array of every number that some layer has, each layer in its leading corner."""
    arrays = {}
    for name in dict.fromkeys(name for each in numbers for name in each):
        shape = [sizes[dim] for dim in CIRCUITS[name].dims]
        out = np.full(shape, np.nan)
        for i, each in enumerate(numbers):
            if name in each:
                values = each[name].detach().to(torch.float64).cpu().numpy()
                out[i][tuple(slice(size) for size in values.shape)] = values
        arrays[name] = out
    return arrays


def _behaviours(
    layers: Sequence[LayerWeights], labels: HeadLabels, heads: int, prefix: str, names_as: str
) -> dict[str, np.ndarray]:
    """Scores by name, and the names of the behaviours that each head shows."""
    shape = (len(layers), heads)
    scores: dict[str, np.ndarray] = {}
    names = np.full(shape, "", object)
    of = {layer.module: layer for layer in labels.layers}
    for i, layer in enumerate(layers):
        found = {} if layer.module not in of else dict(of[layer.module].scores)
        for name in (each for each in BEHAVIOURS if each in found):
            key = prefix + name
            if key not in CIRCUITS:
                continue
            values = found[name].cpu().numpy()
            scores.setdefault(key, np.full(shape, np.nan))[i, : len(values)] = values
            threshold = BEHAVIOURS[name].threshold
            for head in np.flatnonzero(values > threshold) if threshold is not None else ():
                shown = [*filter(None, str(names[i, head]).split(", ")), name.replace("_", " ")]
                names[i, head] = ", ".join(shown)
    return {**scores, names_as: names}


def _on_text(
    layers: Sequence[LayerWeights], on_text: TextCircuits, sizes: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """Behaviours on a text, those of chance and the rows behind them, and shares of pairs."""
    heads, names_as = sizes["head"], f"{TEXT_PREFIX}behaviours"
    arrays = _behaviours(layers, on_text.labels, heads, TEXT_PREFIX, names_as)
    of = {layer.module: layer for layer in on_text.labels.layers}
    for name in _CHANCE:
        if TEXT_PREFIX + name not in arrays:
            continue
        chosen = [of.get(layer.module) for layer in layers]
        for end, values in (
            ("uniform", [None if one is None else one.uniform.get(name) for one in chosen]),
            ("rows", [None if one is None else one.rows.get(name) for one in chosen]),
        ):
            arrays[f"{TEXT_PREFIX}{name}_{end}"] = np.array(values, float)
    shares = [on_text.shares_of(layer) for layer in layers]
    return arrays | _stacked(shares, sizes)


def _variable(name: str, values: np.ndarray) -> tuple[tuple[str, ...], np.ndarray, dict[str, str]]:
    entry = CIRCUITS[name]
    attributes = {
        "long_name": entry.long_name,
        "units": entry.units,
        "definition": entry.definition,
        "source": entry.source,
        "exactness": entry.exactness,
    }
    kind = object if entry.kind == "str" else entry.kind
    return entry.dims, values.astype(kind), {key: text for key, text in attributes.items() if text}
