"""A scan as a table: one row per layer and head."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

__all__ = ["to_dataframe"]

_FACTS = ("module", "role", "number", "mask", "kv_heads", "window")


def to_dataframe(dataset: xr.Dataset) -> pd.DataFrame:
    """A tidy table: a row per (layer, head) that exists, a column per statistic of a head.

    Columns: layer, head, the facts of the layer, then every ``(layer, head)`` variable by name.
    Heads that were not measured are NaN; heads that a layer does not have are left out.
    """
    layers, heads = dataset.sizes["layer"], dataset.sizes["head"]
    exists = dataset["head"].to_numpy()[None, :] < dataset["heads"].to_numpy()[:, None]

    def per_head(values: np.ndarray) -> np.ndarray:
        return np.broadcast_to(values, (layers, heads))[exists]

    columns = {
        "layer": per_head(dataset["layer"].to_numpy()[:, None]),
        "head": per_head(dataset["head"].to_numpy()[None, :]),
        **{
            name: per_head(dataset[name].to_numpy()[:, None])
            for name in _FACTS
            if name in dataset.coords
        },
    }
    for name, array in dataset.data_vars.items():
        if set(array.dims) == {"layer", "head"}:
            columns[str(name)] = per_head(array.transpose("layer", "head").to_numpy())
    return pd.DataFrame(columns)
