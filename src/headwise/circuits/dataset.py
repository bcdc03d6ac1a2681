"""Everything about the circuits of a model as one labelled data set."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from headwise.circuits.matrices import check_finite
from headwise.circuits.measures import (
    change_numbers,
    compositions,
    copying_map,
    layer_numbers,
    rotary_numbers,
)
from headwise.circuits.text_reader import TextCircuits, TextReader
from headwise.errors import FileError, HeadwiseError, OptionError
from headwise.files import whole, writable
from headwise.models.checkpoints import Checkpoint
from headwise.observation.loaded import LoadedModel
from headwise.observation.quiet import quiet
from headwise.observation.run import opened
from headwise.observation.run import scan as measure
from headwise.observation.scan import Scan
from headwise.observation.text import Text
from headwise.results import io
from headwise.results.frame import to_dataframe
from headwise.results.validate import about

if TYPE_CHECKING:
    import pandas

__all__ = [
    "Circuits",
    "add_circuits",
    "circuits",
    "circuits_path",
    "text_reader",
    "with_circuits",
]

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
    text: Text | None = None,
    tokens: int | None = None,
    window: int | None = None,
    allow_long: bool = False,
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
    repeat, and to check that the weights were read as it uses them. With a text it also reads that:
    what every head does on it, and which rotary pairs its queries and keys use.

    Args:
        model_or_path: see ``scan``; None: the small trained model inside the package.
        text: see ``scan``; None: no text is read, unless ``tokens`` or ``window`` say how much of
            the one that ships with the package.
        tokens, window, allow_long: see ``scan``.
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
    weights = _weights(loaded)
    chosen = _chosen(weights.layers, layers)
    changes = _changes(loaded, weights, base, adapter, (dtype, device, trust_remote_code))
    read = None
    if not (text is None and tokens is None and window is None):
        numbers = sorted({weights.layers[i].number for i in chosen})
        options = {"tokens": tokens, "window": window, "allow_long": allow_long, "layers": numbers}
        read = _read(loaded, weights, text, progress, options)
    facts = {"base": _name(base), "adapter": None if adapter is None else str(adapter)}
    picked = [(weights.layers[i], changes[i]) for i in chosen]
    return _measured(loaded, weights, picked, behaviours, read, facts, progress, start)


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


def text_reader(loaded: LoadedModel, heads: Iterable[int] | None = None) -> TextReader | None:
    """What a scan of the model takes as ``each`` so that its text counts into the circuits, too.

    None where there will be no circuits, for the reason that ``add_circuits`` gives.
    """
    try:
        return TextReader(_weights(loaded), heads)
    except (HeadwiseError, MemoryError):
        return None


def add_circuits(
    scan: xr.Dataset,
    loaded: LoadedModel,
    *,
    on_text: TextCircuits | None = None,
    progress: Progress | None = None,
) -> xr.Dataset:
    """The data set of a scan with the circuits of its model, or with a note why there are none.

    Layers are those of the scan. ``on_text``: what a ``text_reader`` gathered during the scan.
    """
    start = time.perf_counter()
    wanted = sorted({int(number) for number in scan["number"].to_numpy()})
    try:
        weights = _weights(loaded) if on_text is None else on_text.weights
        picked = [(weights.layers[i], None) for i in _chosen(weights.layers, wanted)]
        none = {"base": None, "adapter": None}
        found = _measured(loaded, weights, picked, True, on_text, none, progress, start)
        return with_circuits(scan, found)
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


def _measured(
    loaded: LoadedModel,
    weights: HeadWeights,
    picked: Sequence[tuple[LayerWeights, LayerChange | None]],
    behaviours: bool,
    read: TextCircuits | None,
    facts: Mapping[str, Any],
    progress: Progress | None,
    start: float,
) -> Circuits:
    """Everything about the layers that were picked, each with its change if there is one."""
    told = progress or (lambda done, total, what: None)
    distances = _distances(weights.context)
    layers, changes = zip(*picked, strict=True)
    with quiet():
        numbers = _numbers(weights, layers, changes, distances, told)
        told(len(layers), len(layers) + 2, "composition")
        tables = compositions(layers, max(layer.heads for layer in layers))
        told(len(layers) + 1, len(layers) + 2, "repeated tokens")
        labels, notes = _labels(loaded, layers) if behaviours else (None, [])
    whole = {
        **_facts(loaded, weights, start),
        **facts,
        "repeated": None if labels is None else labels.data,
        "text": None if read is None else read.data,
        "notes": [*weights.notes, *notes],
    }
    return Circuits(labelled(layers, numbers, tables, labels, read, distances, whole))


def _read(
    loaded: LoadedModel,
    weights: HeadWeights,
    text: Text | None,
    progress: Progress | None,
    options: dict[str, Any],
) -> TextCircuits:
    """A scan of the text, of which only the circuits are kept."""
    reader = TextReader(weights)
    measured = measure(loaded, text, each=reader.absorb, progress=progress, **options)
    if measured.record.about["interrupted"]:
        raise KeyboardInterrupt
    return reader.finish(measured)


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


def _weights(loaded: LoadedModel) -> HeadWeights:
    for name in loaded.non_finite:  # wherever it is: what the heads do with it is not finite
        check_finite(name, loaded.model.get_parameter(name).detach())
    return head_weights(loaded.model)


def _changes(
    loaded: LoadedModel,
    weights: HeadWeights,
    base: Model | None,
    adapter: str | Path | None,
    options: tuple[Any, ...],
) -> Sequence[LayerChange | None]:
    if base is not None:
        before = opened(base, *options)
        try:
            return difference(_weights(before), weights)
        except HeadwiseError as error:
            raise type(error)(f"compared with the base {before.name}: {error}") from error
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
