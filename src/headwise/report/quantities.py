"""The numbers that rules look at: one per head, layer, block, parameter, or for the whole scan.

Each function takes the data set of a scan and returns a ``Quantity``: values, the place of each,
and the word for a place. What was not measured is NaN and takes no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xarray as xr

from headwise.results import validate
from headwise.results.thresholds import LOCAL_FROM, LOCAL_TOKENS, THRESHOLDS

__all__ = ["QUANTITIES", "Place", "Quantity", "about", "derived", "layer_names"]

Place = tuple[int, int | None]  # layer and head as the data set numbers them; None: whole layer

_SINK_RATE: Final = THRESHOLDS["sinks"]
_SINKS_FROM_HEADS: Final = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Quantity:
    """One number per place."""

    word: str  # "head", "layer", "block", "parameter", "scan"
    values: np.ndarray
    places: tuple[tuple[Place, ...], ...]  # the place or places each value belongs to
    labels: tuple[str, ...]


def about(dataset: xr.Dataset) -> dict[str, Any]:
    """The facts of the run: model, tokens, versions, time, memory."""
    return validate.about(dataset) if "about" in dataset.attrs else {}


def layer_names(dataset: xr.Dataset) -> list[str]:
    """Short names of layers: ``L12``, or ``enc L3`` and ``cross L3`` when there are several roles.

    Example:
        >>> layer_names(xr.Dataset(coords={"role": ("layer", ["encoder", "cross"]),
        ...                                "number": ("layer", [0, 0])}))
        ['enc L0', 'cross L0']
    """
    roles = [str(role) for role in dataset["role"].values]
    short = {"encoder": "enc ", "decoder": "dec ", "cross": "cross "}
    several = len(set(roles)) > 1
    numbers = dataset["number"].values
    names = [f"{short[r] if several else ''}L{int(n)}" for r, n in zip(roles, numbers, strict=True)]
    again = {name for name in names if names.count(name) > 1}
    return [f"{n} ({i})" if n in again else n for i, n in enumerate(names)]


def derived(dataset: xr.Dataset, name: str) -> xr.DataArray:
    """A statistic per head: a variable of the data set, or one summed from such variables.

    ``local_mass`` is the weight on keys nearer than 16 tokens; ``resting_mass`` the weight on the
    first tokens plus that on a learned sink.
    """
    if name == "local_mass":
        near = dataset["band_mass"].where(dataset["band"] < LOCAL_TOKENS, 0.0)
        return near.sum("band", skipna=False)
    if name == "resting_mass":
        learned = dataset["null_mass"].fillna(0.0) if "null_mass" in dataset else 0.0
        return dataset["sink_mass"] + learned
    return dataset[name]


def _heads(dataset: xr.Dataset, name: str, roles: tuple[str, ...] | None = None) -> Quantity:
    array = derived(dataset, name).transpose("layer", "head")
    values = np.asarray(array.values, dtype=np.float64).copy()
    if roles is not None:
        values[~np.isin(dataset["role"].values.astype(str), roles)] = np.nan
    layers, heads = dataset["layer"].values, dataset["head"].values
    names = layer_names(dataset)
    return Quantity(
        word="head",
        values=values.ravel(),
        places=tuple(((int(layer), int(head)),) for layer in layers for head in heads),
        labels=tuple(f"{name} · H{int(head)}" for name in names for head in heads),
    )


def _self_attention(name: str) -> Callable[[xr.Dataset], Quantity]:
    return lambda dataset: _heads(dataset, name, ("decoder", "encoder"))


def _every_head(name: str) -> Callable[[xr.Dataset], Quantity]:
    return lambda dataset: _heads(dataset, name)


def _local_mass(dataset: xr.Dataset) -> Quantity:
    quantity = _self_attention("local_mass")(dataset)
    streams, positions = dataset["stream"].values.astype(str), dataset["position"].values
    longest = {str(name): int(positions[streams == name].max()) + 1 for name in set(streams)}
    lengths = np.array([longest.get(str(name), 0) for name in dataset["key_stream"].values])
    far_enough = np.repeat(lengths >= LOCAL_FROM, dataset.sizes["head"])
    quantity.values[~far_enough] = np.nan
    return quantity


def _layers(dataset: xr.Dataset, values: np.ndarray) -> Quantity:
    return Quantity(
        word="layer",
        values=np.asarray(values, dtype=np.float64),
        places=tuple(((int(layer), None),) for layer in dataset["layer"].values),
        labels=tuple(layer_names(dataset)),
    )


def _non_finite(dataset: xr.Dataset) -> Quantity:
    return _layers(dataset, dataset["non_finite"].values.astype(str) != "")


def _rows_empty(dataset: xr.Dataset) -> Quantity:
    return _layers(dataset, dataset["rows_empty"].values)


def _blocks(dataset: xr.Dataset, values: np.ndarray) -> Quantity:
    stacks = [str(stack) for stack in dataset["stack"].values]
    numbers = [int(number) for number in dataset["block_number"].values]
    several = len(set(stacks)) > 1
    layers = {
        (str(role), int(number)): int(layer)
        for layer, role, number in zip(
            dataset["layer"].values, dataset["role"].values, dataset["number"].values, strict=True
        )
    }
    keys = list(zip(stacks, numbers, strict=True))
    return Quantity(
        word="block",
        values=np.asarray(values, dtype=np.float64),
        places=tuple(((layers[key], None),) if key in layers else () for key in keys),
        labels=tuple(f"{s[:3] + ' ' if several else ''}block {n}" for s, n in keys),
    )


def _ratio(above: str, below: str) -> Callable[[xr.Dataset], Quantity]:
    def ratio(dataset: xr.Dataset) -> Quantity:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _blocks(dataset, dataset[above].values / dataset[below].values)

    return ratio


def _stream_max_abs(dataset: xr.Dataset) -> Quantity:
    return _blocks(dataset, dataset["stream_max_abs"].values)


def _whole(value: float, label: str) -> Quantity:
    return Quantity(word="scan", values=np.array([value]), places=((),), labels=(label,))


def _stream_growth(dataset: xr.Dataset) -> Quantity:
    decoder = np.flatnonzero(dataset["stack"].values.astype(str) == "decoder")
    chosen = decoder if decoder.size else np.arange(dataset.sizes["block"])
    start = float(dataset["stream_in_rms"].values[chosen[0]])
    end = float(dataset["stream_out_rms"].values[chosen[-1]])
    return _whole(end / start if start > 0 else np.nan, "the stream")


def _sink_rate(dataset: xr.Dataset) -> Quantity:
    mass = _heads(dataset, "resting_mass", ("decoder",)).values
    mass = mass[np.isfinite(mass)]
    enough = mass.size >= _SINKS_FROM_HEADS
    return _whole(float((mass > _SINK_RATE).mean()) if enough else np.nan, "the model")


def _parameters(dataset: xr.Dataset, values: np.ndarray, names: list[str]) -> Quantity:
    return Quantity(
        word="parameter",
        values=np.asarray(values, dtype=np.float64),
        places=tuple(() for _ in names),
        labels=tuple(names),
    )


def _gradient_rms(dataset: xr.Dataset) -> Quantity:
    norms, sizes = dataset["gradient_norm"].values, dataset["gradient_size"].values
    names = [str(name) for name in dataset["parameter"].values]
    return _parameters(dataset, norms / np.sqrt(np.maximum(sizes, 1)), names)


def _gradient_imbalance(dataset: xr.Dataset) -> Quantity:
    """Largest over smallest norm across blocks, per projection; matrices of attention and MLP."""
    norms = dataset["gradient_norm"].values
    names = [str(name) for name in dataset["parameter"].values]
    blocks, kinds = dataset["parameter_block"].values, dataset["projection"].values.astype(str)
    groups: dict[str, list[float]] = {}
    for name, block, kind, norm in zip(names, blocks, kinds, norms, strict=True):
        if block >= 0 and kind not in ("norm", "other") and name.endswith("weight") and norm > 0:
            tail = name.split(".")[-2] if "." in name else name
            groups.setdefault(f"{kind} ({tail})", []).append(float(norm))
    ratios = {name: max(group) / min(group) for name, group in groups.items() if len(group) > 1}
    quantity = _parameters(dataset, np.array(list(ratios.values())), list(ratios))
    return Quantity(
        word="projection", values=quantity.values, places=quantity.places, labels=quantity.labels
    )


def _unsampled_share(dataset: xr.Dataset) -> Quantity:
    facts = about(dataset)
    measured, total = facts.get("rows_measured"), facts.get("rows_total")
    return _whole(float(measured) / float(total) if measured and total else np.nan, "the scan")


def _interrupted(dataset: xr.Dataset) -> Quantity:
    return _whole(float(bool(about(dataset).get("interrupted"))), "the scan")


# Quantity -> (the variables it needs, how to get it).
QUANTITIES: Final[Mapping[str, tuple[tuple[str, ...], Callable[[xr.Dataset], Quantity]]]] = {
    "non_finite": (("non_finite",), _non_finite),
    "max_logit": (("max_logit",), _every_head("max_logit")),
    "dead_rows_not_sink": (("dead_rows_not_sink",), _every_head("dead_rows_not_sink")),
    "entropy_without_sink_fraction": (
        ("entropy_without_sink_fraction",),
        _every_head("entropy_without_sink_fraction"),
    ),
    "logit_std": (("logit_std",), _every_head("logit_std")),
    "entropy_fraction": (("entropy_fraction",), _every_head("entropy_fraction")),
    "sink_mass": (("sink_mass",), _self_attention("sink_mass")),
    "resting_mass": (("sink_mass",), _self_attention("resting_mass")),
    "sink_rate": (("sink_mass",), _sink_rate),
    "previous_mass": (("previous_mass",), _self_attention("previous_mass")),
    "local_mass": (("band_mass",), _local_mass),
    "rows_empty": (("rows_empty",), _rows_empty),
    "first_token_ratio": (
        ("stream_out_rms_first", "stream_out_rms"),
        _ratio("stream_out_rms_first", "stream_out_rms"),
    ),
    "attention_write_share": (
        ("attention_write_rms", "stream_in_rms"),
        _ratio("attention_write_rms", "stream_in_rms"),
    ),
    "mlp_write_share": (
        ("mlp_write_rms", "stream_in_rms"),
        _ratio("mlp_write_rms", "stream_in_rms"),
    ),
    "stream_max_abs": (("stream_max_abs",), _stream_max_abs),
    "stream_growth": (("stream_in_rms", "stream_out_rms"), _stream_growth),
    "gradient_rms": (("gradient_norm", "gradient_size"), _gradient_rms),
    "gradient_imbalance": (("gradient_norm",), _gradient_imbalance),
    "unsampled_share": ((), _unsampled_share),
    "interrupted": ((), _interrupted),
}
