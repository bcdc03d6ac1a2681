"""Everything about the circuits of a model as one labelled data set."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import xarray as xr
from torch import Tensor, nn

from headwise.circuits.behaviour import HeadLabels
from headwise.circuits.difference import LayerChange, adapter_difference, difference
from headwise.circuits.head_weights import head_weights
from headwise.circuits.labelled import joined, labelled
from headwise.circuits.labels import repeated_labels
from headwise.circuits.layer_weights import HeadWeights, LayerWeights
from headwise.circuits.measures import (
    change_numbers,
    compositions,
    copying_map,
    layer_numbers,
    rotary_numbers,
)
from headwise.errors import FileError, HeadwiseError, OptionError
from headwise.files import whole, writable
from headwise.models.checkpoints import Checkpoint
from headwise.observation.loaded import LoadedModel
from headwise.observation.quiet import quiet
from headwise.observation.run import opened
from headwise.observation.scan import Scan
from headwise.results import io
from headwise.results.frame import to_dataframe
from headwise.results.validate import about

if TYPE_CHECKING:
    import pandas

__all__ = ["Circuits", "add_circuits", "circuits", "circuits_path", "with_circuits"]

Model = str | Path | nn.Module | LoadedModel | Checkpoint
Progress = Callable[[int, int, str], None]

_LONGEST: Final = 2**14  # tokens; no distance is longer


@dataclass(frozen=True, eq=False)
class Circuits:
    """What the heads of a model are made of: ``dataset`` (layer, head, rank, pair, …).

    Example:
        >>> import headwise as hw
        >>> hw.circuits(behaviours=False)
        Circuits(embedded model, 5 layers, 5 heads)
    """

    dataset: xr.Dataset

    def save(self, path: str | Path) -> Path:
        """Write the data set (.nc, .zarr) or the table by heads (.csv); whole or not at all.

        Example:
            >>> import tempfile
            >>> import headwise as hw
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     hw.circuits(behaviours=False).save(f"{folder}/heads.csv").name
            'heads.csv'
        """
        target = circuits_path(path)
        if target.suffix != ".csv":
            return io.save(self.dataset, target)
        with whole(target) as temporary:
            self.to_dataframe().to_csv(temporary, index=False)
        return target

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per layer and head, one column per number.

        Example:
            >>> import headwise as hw
            >>> table = hw.circuits(behaviours=False).to_dataframe()
            >>> len(table), "copying" in table
            (25, True)
        """
        return to_dataframe(self.dataset)

    def __repr__(self) -> str:
        facts = about(self.dataset)
        sizes = self.dataset.sizes
        return f"Circuits({facts['model']}, {sizes['layer']} layers, {sizes['head']} heads)"


def circuits(
    model_or_path: Model | None = None,
    *,
    layers: Iterable[int] | None = None,
    base: Model | None = None,
    adapter: str | Path | None = None,
    behaviours: bool = True,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Circuits:
    """W_QK and W_OV of every head: spectra, ranks, scores, composition, rotary pairs, behaviours.

    Exact, from the thin factors; the model runs only for the behaviours, on random tokens that
    repeat, and to check that the weights were read as it uses them.

    Args:
        model_or_path: see ``scan``; None: the small trained model inside the package.
        layers: numbers of the layers (None: all).
        base: the model that this one was tuned from: also the change of every head.
        adapter: folder of a PEFT LoRA adapter for this model: also the change that it makes.
        behaviours: run the model on repeated tokens.
        dtype, device, trust_remote_code: see ``load_model``.
        progress: called with (done, total, what).

    Raises:
        ModelError: a family whose weights are not known, or that do not validate; an adapter for
            another base.
        NonFiniteError: NaN or infinity in a weight, by name and place.
        OptionError: layers that the model does not have.

    Example:
        >>> found = circuits(layers=[0, 1], behaviours=False).dataset
        >>> found["qk_effective_rank"].shape, found["ov_singular_values"].dims
        ((2, 5), ('layer', 'head', 'rank'))
    """
    if base is not None and adapter is not None:
        raise OptionError("a base and an adapter were given", allowed="one of the two")
    start = time.perf_counter()
    loaded = opened(model_or_path, dtype, device, trust_remote_code)
    weights = head_weights(loaded.model)
    changes = _changes(loaded, weights, base, adapter, (dtype, device, trust_remote_code))
    chosen = _chosen(weights.layers, layers)
    picked = [weights.layers[i] for i in chosen]
    told = progress or (lambda done, total, what: None)
    distances = _distances(weights.context)
    with quiet():
        numbers = _numbers(weights, picked, [changes[i] for i in chosen], distances, told)
        told(len(picked), len(picked) + 2, "composition")
        tables = compositions(picked, max(layer.heads for layer in picked))
        told(len(picked) + 1, len(picked) + 2, "repeated tokens")
        labels, notes = _labels(loaded, picked) if behaviours else (None, [])
    facts = {
        **_facts(loaded, weights, start),
        "base": _name(base),
        "adapter": None if adapter is None else str(adapter),
        "repeated": None if labels is None else labels.data,
        "notes": [*weights.notes, *notes],
    }
    return Circuits(labelled(picked, numbers, tables, labels, distances, facts))


def with_circuits(scan: xr.Dataset | Scan, found: Circuits) -> xr.Dataset:
    """The data set of a scan with the circuits of the same model in it, for its page and its file.

    Layers are matched by module; a layer of which there are no circuits is NaN.

    Example:
        >>> import headwise as hw
        >>> from headwise.circuits.dataset import with_circuits
        >>> both = with_circuits(hw.scan(tokens=40), hw.circuits(behaviours=False))
        >>> both["entropy"].shape == both["copying"].shape
        True
    """
    return joined(scan.dataset if isinstance(scan, Scan) else scan, found.dataset)


def add_circuits(
    scan: xr.Dataset, loaded: LoadedModel, *, progress: Progress | None = None
) -> xr.Dataset:
    """The data set of a scan with the circuits of its model, or with a note why there are none.

    Layers are those of the scan.
    """
    wanted = sorted({int(number) for number in scan["number"].to_numpy()})
    try:
        return with_circuits(scan, circuits(loaded, layers=wanted, progress=progress))
    except (HeadwiseError, MemoryError) as error:
        facts = about(scan)
        reason = str(error) or "out of memory"
        facts["notes"] = [*facts.get("notes", []), f"no circuits: {reason}"]
        noted = scan.copy()
        noted.attrs = {**scan.attrs, "about": json.dumps(facts, sort_keys=True)}
        return noted


def circuits_path(path: str | Path) -> Path:
    """The path, after making sure that circuits can be saved there."""
    target = Path(path).expanduser()
    if target.suffix not in (".nc", ".zarr", ".csv"):
        raise FileError(
            f"cannot save circuits as {target.name}",
            allowed=".nc (NetCDF), .zarr (a folder) or .csv (a row per head)",
            to_do="for the page, name an .html file",
        )
    if target.suffix == ".csv":
        writable(target)
        return target
    return io.save_path(target)


def _name(model: Model | None) -> str | None:
    if model is None:
        return None
    if isinstance(model, str | Path):
        return str(model)
    return str(getattr(model, "name", type(model).__name__))


def _facts(loaded: LoadedModel, weights: HeadWeights, start: float) -> dict[str, Any]:
    from headwise import __version__

    return {
        "model": loaded.name,
        "architecture": loaded.architecture,
        "context": weights.context,
        "dtype": str(weights.layers[0].query.dtype).removeprefix("torch."),
        "computed_dtype": "float64",
        "exactness": "exact, from the thin factors",
        "validated": weights.validated,
        "seconds": time.perf_counter() - start,
        "versions": {"headwise": __version__, "torch": str(torch.__version__)},
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _changes(
    loaded: LoadedModel,
    weights: HeadWeights,
    base: Model | None,
    adapter: str | Path | None,
    options: tuple[Any, ...],
) -> Sequence[LayerChange | None]:
    if base is not None:
        return difference(head_weights(opened(base, *options).model), weights)
    if adapter is not None:
        return adapter_difference(loaded.model, adapter)
    return [None] * len(weights.layers)


def _chosen(found: Sequence[LayerWeights], layers: Iterable[int] | None) -> list[int]:
    if layers is None:
        return list(range(len(found)))
    wanted = {int(number) for number in layers}
    numbers = {layer.number for layer in found}
    wrong = sorted(wanted - numbers)
    if wrong or not wanted:
        named = f"the model has no layer {wrong[0]}" if wrong else "no layer is named"
        raise OptionError(named, allowed=f"{min(numbers)} to {max(numbers)}")
    return [i for i, layer in enumerate(found) if layer.number in wanted]


def _distances(context: int | None) -> list[int]:
    """0, 1, 8, 64, … below the trained length."""
    longest = min(context or 2048, _LONGEST)
    return [0, *(8**i for i in range(5) if 8**i < longest)]


def _numbers(
    weights: HeadWeights,
    layers: Sequence[LayerWeights],
    changes: Sequence[LayerChange | None],
    distances: Sequence[int],
    told: Progress,
) -> list[dict[str, Tensor]]:
    told(0, len(layers) + 2, "reading the vocabulary")
    through = copying_map(weights)
    # Beside a decoder, what an encoder writes does not reach the logits through the stream.
    pair = any(layer.role == "cross" for layer in weights.layers)
    spreads: dict[tuple[str, int, int], float] = {}
    numbers = []
    for i, (layer, change) in enumerate(zip(layers, changes, strict=True)):
        told(i, len(layers) + 2, f"layer {i + 1} of {len(layers)}")
        found = layer_numbers(layer, None if pair and layer.role == "encoder" else through, spreads)
        found |= rotary_numbers(layer, weights.context, distances)
        numbers.append(found if change is None else found | change_numbers(change))
    return numbers


def _labels(
    loaded: LoadedModel, layers: Sequence[LayerWeights]
) -> tuple[HeadLabels | None, list[str]]:
    """Behaviours on repeated tokens; where the model cannot read those, the reason."""
    try:
        return repeated_labels(loaded, layers=sorted({layer.number for layer in layers})), []
    except HeadwiseError as error:
        return None, [f"no behaviours on repeated tokens: {error}"]
