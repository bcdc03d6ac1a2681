"""The door from losses and spectra to the labelled data set of ``truncate``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from headwise.circuits.cuts import Cut
from headwise.circuits.layer_weights import LayerWeights
from headwise.circuits.surgery import LossByRank

__all__ = ["labelled"]

_DIMS = ("matrix", "rank", "layer", "head")


def labelled(
    layers: Sequence[LayerWeights],
    cuts: Sequence[Cut],
    losses: LossByRank,
    alone: Mapping[tuple[int, int], float] | None,
    facts: Mapping[str, Any],
) -> xr.Dataset:
    """Everything by rank, layer and head; heads that were not cut are NaN."""
    matrices = list(dict.fromkeys(cut.circuit for cut in cuts))
    indices = sorted({cut.layer for cut in cuts})
    heads = sorted({head for cut in cuts for head in cut.heads})
    shape = [len(matrices), len(losses.ranks), len(indices), len(heads)]
    energy, parameters = np.full(shape, np.nan), np.zeros(len(losses.ranks), np.int64)
    for cut in cuts:
        at, columns = indices.index(cut.layer), [heads.index(head) for head in cut.heads]
        kept = kept_energy(cut, losses.ranks)
        for column, of_head in zip(columns, kept.T, strict=True):
            energy[matrices.index(cut.circuit), :, at, column] = of_head
        parameters += [len(cut.heads) * free_numbers(layers, cut, rank) for rank in losses.ranks]
    variables: dict[str, Any] = {
        "loss": ("rank", list(losses.losses), _about("mean loss", "nats per token")),
        "change": ("rank", list(losses.changes), _about("loss less the whole's", "nats per token")),
        "parameters": ("rank", parameters, _about("Σ r (d + e − r) over the products", "")),
        "energy": (_DIMS, energy, _about("Σ_{i≤r} σ_i² / Σ σ_i²", "")),
    }
    if alone is not None:
        changes = np.full(shape[2:], np.nan)
        for (layer, head), change in alone.items():
            changes[indices.index(layer), heads.index(head)] = change
        words = f"change of the loss with this head alone at rank {facts['each']}"
        variables["change_alone"] = (_DIMS[2:], changes, _about(words, "nats per token"))
    coordinates = {
        "matrix": matrices,
        "rank": list(losses.ranks),
        "layer": indices,
        "head": heads,
        "module": ("layer", [layers[i].module for i in indices]),
        "role": ("layer", [layers[i].role for i in indices]),
        "number": ("layer", [layers[i].number for i in indices]),
    }
    told = {**facts, "width": min(cut.most for cut in cuts), "stored": stored(layers, cuts)}
    about = json.dumps(told, sort_keys=True, default=str)
    return xr.Dataset(variables, coordinates, attrs={"holds": "truncation", "about": about})


def kept_energy(cut: Cut, ranks: Sequence[int]) -> np.ndarray:
    """Σ_{i≤r} σ_i² / Σ σ_i² of each head, ``rank head``; 1 for a product that is zero."""
    sums = cut.values.square().cumsum(-1).cpu().numpy()
    whole = sums[:, -1:]
    shares = np.divide(sums, whole, out=np.ones_like(sums), where=whole > 0)
    return np.stack([shares[:, min(rank, shares.shape[-1]) - 1] for rank in ranks])


def free_numbers(layers: Sequence[LayerWeights], cut: Cut, rank: int) -> int:
    """r (d + e − r): the free numbers of one product d×e of rank r."""
    layer = layers[cut.layer]
    product = layer.qk() if cut.circuit == "qk" else layer.ov()
    d, e = product.shape[-2:]
    r = min(rank, product.values)
    return r * (d + e - r)


def stored(layers: Sequence[LayerWeights], cuts: Sequence[Cut]) -> int:
    """The numbers that the model keeps for these matrices; shared keys and values count once."""
    total = 0
    for cut in cuts:
        layer = layers[cut.layer]
        own, shared = (
            (layer.query, layer.key) if cut.circuit == "qk" else (layer.output, layer.value)
        )
        group = layer.heads // layer.kv_heads
        total += len(cut.heads) * own[0].numel()
        total += len({head // group for head in cut.heads}) * shared[0].numel()
    return total


def _about(words: str, unit: str) -> dict[str, str]:
    return {"long_name": words, "units": unit}
