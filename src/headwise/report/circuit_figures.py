"""The data behind the figures of the circuits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import xarray as xr

from headwise.report.circuit_facts import Z_FROM, edges, labelled_heads
from headwise.report.embed import Packed, pack_half
from headwise.report.quantities import about

__all__ = ["behaviours", "circuit_arrays", "circuit_facts", "circuit_notes"]

_MAPS: Final = (
    "qk_effective_rank_folded",
    "ov_effective_rank_folded",
    "copying",
    "qk_spectral_norm_folded",
    "ov_spectral_norm_folded",
)
_SPECTRA: Final = ("qk_singular_values_folded", "ov_singular_values_folded")


def circuit_facts(dataset: xr.Dataset) -> dict[str, Any] | None:
    """What the page needs besides the table of numbers; None without circuits."""
    if _MAPS[0] not in dataset:
        return None
    found = edges(dataset)
    return {
        "maps": [name for name in _MAPS if name in dataset],
        "rank": dataset.sizes["rank"],
        "edges": [
            [edge.kind, *edge.earlier, *edge.later, round(edge.value, 4), round(edge.z, 1)]
            for edge in found.shown
        ],
        "above": found.above,
        "pairs": found.pairs,
        "zFrom": Z_FROM,
        "labels": {
            f"{layer},{head}": str(names)
            for (layer, head), names in np.ndenumerate(dataset["behaviours"].values)
            if names
        }
        if "behaviours" in dataset
        else {},
    }


def circuit_arrays(dataset: xr.Dataset) -> dict[str, Packed]:
    """The singular values of every head, W_QK then W_OV; nothing without circuits."""
    if _MAPS[0] not in dataset:
        return {}
    shape = [dataset.sizes[dim] for dim in ("layer", "head", "rank")]
    values = [
        dataset[name].values if name in dataset else np.full(shape, np.nan) for name in _SPECTRA
    ]
    return {"spectra": pack_half(np.stack(values))}


def behaviours(dataset: xr.Dataset) -> dict[str, Any] | None:
    """Behaviours with their heads, as the data set numbers them, and the data they come from."""
    data = (about(dataset).get("circuits") or about(dataset)).get("repeated")
    if data is None or "behaviours" not in dataset:
        return None
    layers, heads = dataset["layer"].values, dataset["head"].values
    return {
        "data": str(data),
        "rows": [
            {
                "name": word,
                "heads": [
                    (int(layers[layer]), int(heads[head]), score) for (layer, head), score in places
                ],
            }
            for word, places in labelled_heads(dataset).items()
        ],
    }


def circuit_notes(dataset: xr.Dataset) -> list[str]:
    """What holds up to a factor only, and what could not be measured."""
    if _MAPS[0] not in dataset:
        return []
    forms = {str(each) for name in ("qk_form", "ov_form") for each in dataset[name].values}
    facts = about(dataset).get("circuits") or about(dataset)
    return [*sorted(forms - {""}), *(str(note) for note in facts.get("notes", []))]
