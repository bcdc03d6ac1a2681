"""The data behind the figures of the circuits."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import xarray as xr

from headwise.report.circuit_facts import Z_FROM, Told, compared, edges, labelled_heads
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
_COLUMNS: Final = ("on both", "only on repeated tokens", "only on the text")
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
        "labels": _labels(dataset, "behaviours"),
        "textLabels": _labels(dataset, "text_behaviours"),
    }


def _labels(dataset: xr.Dataset, name: str) -> dict[str, str]:
    """The names of the behaviours of every head that shows one."""
    if name not in dataset:
        return {}
    return {
        f"{layer},{head}": str(names)
        for (layer, head), names in np.ndenumerate(dataset[name].values)
        if names
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
    """The table of behaviours: the data they come from, columns, and a row of cells for each.

    A cell is a list of (layer, head, scores in words), as the data set numbers them, or None where
    a behaviour is not scored on that data.
    """
    facts = about(dataset).get("circuits") or about(dataset)
    data = [facts.get(name) for name in ("repeated", "text")]
    both = compared(dataset)
    if both:
        rows = [
            {
                "name": each.word,
                "chance": _chance(dataset, each.word),
                "cells": [
                    _cell(dataset, [(h.place, _pair(h)) for h in heads])
                    if each.scored_on_both or heads
                    else None
                    for heads in (each.both, each.repeated, each.text)
                ],
            }
            for each in both
        ]
        return _table(data, _COLUMNS, rows)
    for on, words in zip(("repeated", "text"), data, strict=True):
        if words is not None:
            rows = [
                {
                    "name": word,
                    "chance": _chance(dataset, word) if on == "text" else "",
                    "cells": [_cell(dataset, [(p, f"{x:.2f}") for p, x in heads])],
                }
                for word, heads in labelled_heads(dataset, on).items()
            ]
            return _table([words], (), rows)
    return None


def _table(data: list[Any], columns: tuple[str, ...], rows: list[dict[str, Any]]) -> dict[str, Any]:
    chance = any(row["chance"] for row in rows)
    return {"data": data, "columns": columns, "rows": rows, "chance": chance}


def _chance(dataset: xr.Dataset, word: str) -> str:
    """What a head that attends to all alike scores on the text; layers differ by their windows."""
    name = f"text_{word.replace(' ', '_')}_uniform"
    if name not in dataset:
        return ""
    least, most = (f"{x:.2f}" for x in (float(dataset[name].min()), float(dataset[name].max())))
    return least if least == most else f"{least}–{most}"


def _cell(
    dataset: xr.Dataset, heads: list[tuple[tuple[int, int], str]]
) -> list[tuple[int, int, str]]:
    layers, numbers = dataset["layer"].values, dataset["head"].values
    return [(int(layers[layer]), int(numbers[head]), words) for (layer, head), words in heads]


def _pair(head: Told) -> str:
    scores = (head.repeated, head.text)
    return " / ".join("–" if np.isnan(score) else f"{score:.2f}" for score in scores)


def circuit_notes(dataset: xr.Dataset) -> list[str]:
    """What holds up to a factor only, and what could not be measured."""
    if _MAPS[0] not in dataset:
        return []
    forms = {str(each) for name in ("qk_form", "ov_form") for each in dataset[name].values}
    facts = about(dataset).get("circuits") or about(dataset)
    return [*sorted(forms - {""}), *(str(note) for note in facts.get("notes", []))]
