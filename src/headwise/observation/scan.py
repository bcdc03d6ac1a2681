"""A scan: what a user holds while and after a model is observed."""

from __future__ import annotations

import platform
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headwise.errors import MeasurementError
from headwise.observation.inference import ordinary_tensors
from headwise.observation.record import LayerAccumulator
from headwise.observation.recorder import Recorder
from headwise.observation.stream import BlockSums, StreamRecorder
from headwise.observation.tokens import Stream
from headwise.results.records import GradientRecord, LayerRecord, ScanRecord, TokenStream

if TYPE_CHECKING:
    import pandas
    import xarray

__all__ = ["Scan"]


class Scan:
    """Every statistic of the attention calls of one observation, labelled on demand.

    While the ``with`` block of ``observe`` is open the scan grows; ``record`` and ``dataset`` are
    what has been measured so far. Scans of one model can be merged: the scan of two halves is the
    scan of the whole.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[str, int], LayerAccumulator] = {}
        self._reads: dict[tuple[str, int], tuple[str, str]] = {}
        self._streams: dict[str, Stream] = {}
        self._blocks: dict[tuple[str, int], BlockSums] = {}
        self._gradients: tuple[GradientRecord, ...] = ()
        self._stream_gradients: dict[str, float] = {}
        self._tokenizer: Any = None
        self._notes: dict[str, None] = {}
        self._facts: dict[str, Any] = {}

    @classmethod
    def _of(
        cls,
        model: nn.Module,
        about: dict[str, Any],
        recorder: Recorder,
        residual: StreamRecorder | None,
        tokenizer: Any,
    ) -> Scan:
        """The scan that a recorder is filling."""
        scan = cls()
        scan._layers, scan._reads = recorder.layers, recorder.reads
        scan._streams, scan._notes = recorder.stacks.streams, recorder.notes
        scan._blocks = {} if residual is None else residual.sums
        scan._tokenizer = tokenizer
        scan._facts = _facts(model, about, recorder.options.sink_keys)
        return scan

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the run, to be added to: they end up in ``record.about``."""
        self._changed()
        return self._facts

    def note(self, sentence: str) -> None:
        """Add a plain sentence to ``record.about["notes"]``."""
        self._changed()
        self._notes[sentence] = None

    def add_gradients(
        self,
        records: tuple[GradientRecord, ...],
        *,
        loss: float,
        stream_rms: dict[str, float] | None = None,
    ) -> None:
        """Put gradient norms beside the statistics; ``stream_rms`` is by block path."""
        self._changed()
        self._gradients = tuple(records)
        self._stream_gradients = dict(stream_rms or {})
        self._facts["loss"] = loss

    @ordinary_tensors()
    def merge(self, other: Scan) -> Scan:
        """Take in everything another scan of the same model holds; returns this scan.

        Tokens of the other scan become further documents. Gradients do not add up over scans and
        stay those of this one.
        """
        kind, another = _kind(self._facts), _kind(other._facts)
        if kind != another:
            raise MeasurementError(
                f"a scan of {kind} cannot take in one of {another}", allowed="scans of one model"
            )
        if self._facts["sink_keys"] != other._facts["sink_keys"]:
            raise MeasurementError(
                f"scans with sink_keys {self._facts['sink_keys']} and {other._facts['sink_keys']} "
                "cannot be merged",
                allowed="one value",
            )
        self._changed()
        shift = {name: stream.ids.length for name, stream in self._streams.items()}
        for name, stream in other._streams.items():
            self._streams.setdefault(name, Stream(stream.unit)).absorb(stream)
        for key, layer in other._layers.items():
            query, source = other._reads[key]
            self._reads.setdefault(key, (query, source))
            mine = self._layers.get(key)
            if mine is None:
                mine = self._layers[key] = layer.empty()
            mine.merge(layer, shift.get(query, 0), shift.get(source, 0))
        for place, sums in other._blocks.items():
            if place in self._blocks:
                self._blocks[place].merge(sums)
            else:
                self._blocks[place] = BlockSums(sums.path, sums.number, sums.width)
                self._blocks[place].merge(sums)
        self._notes.update(other._notes)
        for name in ("seconds", "cpu_seconds"):
            self._facts[name] += other._facts[name]
        for name in ("peak_memory_bytes", "interrupted"):
            self._facts[name] = max(self._facts[name], other._facts[name])
        return self

    @cached_property
    def record(self) -> ScanRecord:
        """The measurement as frozen tensors, without labels."""
        names = _stream_names(self._streams, self._reads, self._layers)
        orders = {path: stream.order() for path, stream in self._streams.items()}
        layers = []
        for key, layer in self._layers.items():
            query, source = self._reads[key]
            layers.append(layer.finish(names[query], names[source], orders[query], orders[source]))
        tokens = tuple(
            _tokens(names[path], stream, orders[path], self._tokenizer)
            for path, stream in self._streams.items()
            if stream.ids.length
        )
        roles = {layer.module: layer.role for layer in layers}
        blocks = []
        for sums in self._blocks.values():
            block = sums.finish(_stack_of(sums.path, roles))
            rms = self._stream_gradients.get(sums.path)
            blocks.append(block if rms is None else replace(block, stream_gradient_rms=rms))
        return ScanRecord(
            layers=tuple(layers),
            blocks=tuple(blocks),
            tokens=tokens,
            gradients=self._gradients,
            about=self._about(layers, tokens),
        )

    @cached_property
    def dataset(self) -> xarray.Dataset:
        """The labelled data set (dims layer, head, query, key, …); see docs/schema.md."""
        from headwise.results.label import to_dataset

        return to_dataset(self.record)

    def save(self, path: str | Path) -> Path:
        """Write the data set to a ``.nc`` file or ``.zarr`` folder; whole or not at all."""
        from headwise.results.io import save

        return save(self.dataset, path)

    def to_dataframe(self) -> pandas.DataFrame:
        """One row per layer and head, one column per statistic."""
        from headwise.results.frame import to_dataframe

        return to_dataframe(self.dataset)

    def _repr_html_(self) -> str:
        from headwise.results.display import html

        return html(self.dataset)

    def __str__(self) -> str:
        from headwise.results.display import text

        return text(self.dataset) if self._layers else "a scan that holds no layer yet"

    def __rich__(self) -> str:
        from rich.markup import escape

        return escape(str(self))

    def __repr__(self) -> str:
        return f"Scan({self._facts.get('model')}, {len(self._layers)} layers)"

    def _changed(self) -> None:
        """Forget what was derived from a smaller measurement."""
        self.__dict__.pop("record", None)
        self.__dict__.pop("dataset", None)

    def _about(self, layers: list[LayerRecord], tokens: tuple[TokenStream, ...]) -> dict[str, Any]:
        largest = max(layers, key=lambda layer: layer.rows_total, default=None)
        measured = 0 if largest is None else largest.rows
        total = 0 if largest is None else largest.rows_total
        return {
            **self._facts,
            "tokens": sum(len(stream.texts) for stream in tokens),
            "documents": max((int(s.document.max()) + 1 for s in tokens), default=0),
            "rows_measured": measured,
            "rows_total": total,
            "exactness": (
                "exact over all rows"
                if measured == total
                else f"exact on {measured} of {total} rows"
            ),
            "notes": list(self._notes),
        }


def _kind(facts: dict[str, Any]) -> str:
    """The architecture in words, with the digest of its sizes where it has one."""
    name, digest = str(facts.get("architecture")), facts.get("architecture_digest")
    return name if digest is None else f"{name} ({digest})"


def _facts(model: nn.Module, about: dict[str, Any], sink_keys: int) -> dict[str, Any]:
    """What is known before anything ran; ``about`` is what the survey says of the model."""
    from headwise import __version__

    parameter = next(model.parameters(), torch.empty(0))
    double = parameter.dtype == torch.float64
    return {
        **about,
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "computed_dtype": "float64" if double else "float32",
        "sink_keys": sink_keys,
        "seconds": 0.0,
        "cpu_seconds": 0.0,
        "peak_memory_bytes": 0,
        "versions": {
            "headwise": __version__,
            "torch": str(torch.__version__),
            **about["versions"],
            "python": platform.python_version(),
        },
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(Path(arg).name if i == 0 else arg for i, arg in enumerate(sys.argv)),
        "device": str(parameter.device),
        "interrupted": False,
    }


def _stream_names(
    streams: dict[str, Stream],
    reads: dict[tuple[str, int], tuple[str, str]],
    layers: dict[tuple[str, int], LayerAccumulator],
) -> dict[str, str]:
    """Names of the streams: source and target where there is cross-attention, else text.

    Further stacks, such as a vision tower, are called by their path.
    """
    names: dict[str, str] = {}
    for key, (query, source) in reads.items():
        if layers[key].role == "cross":
            names.setdefault(query, "target" if "target" not in names.values() else query)
            names.setdefault(source, "source" if "source" not in names.values() else source)
    rest = [path for path in streams if path not in names and streams[path].ids.length]
    rest.sort(key=lambda path: not bool((streams[path].ids.view() >= 0).any()))
    for path in rest:
        free = "text" not in names.values() and not names
        names[path] = "text" if free else path or type(streams[path]).__name__
    for path in streams:
        names.setdefault(path, path)
    return names


def _tokens(name: str, stream: Stream, order: Tensor, tokenizer: Any) -> TokenStream:
    """The tokens of a stream in order, named by the tokenizer where they have ids."""
    ids = stream.ids.view()[order].clone()
    position = stream.position.view()[order].clone()
    known: dict[int, str] = {}
    if tokenizer is not None:
        different = sorted({i for i in ids.tolist() if i >= 0})
        known = {i: str(tokenizer.decode([i])) for i in different}
    texts = tuple(
        known.get(i, "") if i >= 0 else f"{stream.unit} {p}"
        for i, p in zip(ids.tolist(), position.tolist(), strict=True)
    )
    return TokenStream(
        name=name, texts=texts, ids=ids, document=stream.document.view()[order].clone(),
        position=position,
    )  # fmt: skip


def _stack_of(block: str, roles: dict[str, str]) -> str:
    """The stack a block belongs to, from the attention it holds or its neighbours hold."""
    path = block.split(" (run")[0]
    place = path.rpartition(".")[0]
    for prefix in (f"{path}.", f"{place}."):
        inside = [role for module, role in roles.items() if module.startswith(prefix)]
        if inside:
            return "encoder" if all(role == "encoder" for role in inside) else "decoder"
    return "decoder"
