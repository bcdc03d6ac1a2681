"""What is known of one training step, and how a run keeps it: one line of JSON for each record."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from headwise.errors import FileError

__all__ = ["ABOUT", "RECORDS", "LayerRecord", "Run", "StepRecord", "read_run"]

RECORDS: Final = "health.jsonl"
ABOUT: Final = "health.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRecord:
    """One attention module: every figure is a number for each head (``head_sums.FIGURES``)."""

    module: str
    number: int
    role: str
    figures: dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step.

    Attributes:
        step: 1 is the first. ``time``: seconds since 1970.
        stream: path of a block → rms of first tokens and of the others after it, and the norm of
            the gradient there.
        weights: name of a parameter → norm of its gradient before clipping, of itself, of its
            update.
        non_finite: the first tensor that held NaN or infinity; "" if none did.
        values: the loss where the model gave one, and what ``Monitor.log`` was given.
    """

    step: int
    time: float
    layers: tuple[LayerRecord, ...]
    stream: dict[str, dict[str, float]]
    weights: dict[str, dict[str, float]]
    non_finite: str
    values: dict[str, float]

    def to_json(self) -> str:
        """One line; numbers that are not finite are null."""
        return json.dumps(_plain(asdict(self)), separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> StepRecord:
        """The record of a line; null is NaN again."""
        found = _numbers(json.loads(line))
        layers = tuple(LayerRecord(**layer) for layer in found.pop("layers"))
        record = cls(layers=layers, **found)
        if not _is_whole(record):
            raise ValueError("a line of something else")
        return record


@dataclass(frozen=True, slots=True)
class Run:
    """A run that was monitored: facts of it, and its records in order."""

    folder: Path
    about: dict[str, Any]
    records: tuple[StepRecord, ...]
    cut: bool = False  # the last line was not whole: the run stopped while it was written


def read_run(folder: str | Path) -> Run:
    """The records of a run, as far as they are whole.

    Raises:
        FileError: there is no such folder, or it holds no records.
    """
    path = Path(folder).expanduser()
    if not (path / RECORDS).is_file():
        found = "is no folder" if not path.is_dir() else f"has no {RECORDS}"
        raise FileError(
            f"{path} {found}", allowed="the folder of a run with a monitor",
            to_do="train with headwise train --monitor, or give hw.Monitor out=",
        )  # fmt: skip
    records, cut = [], False
    for line in _lines(path / RECORDS):
        try:
            records.append(StepRecord.from_json(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            cut = True
    if not records:
        raise FileError(f"{path / RECORDS} holds no whole record", to_do="wait for the first one")
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = {}
    about = about if isinstance(about, dict) else {}
    last = {record.step: record for record in records}  # a step may have been done again
    return Run(path, about, tuple(last[step] for step in sorted(last)), cut)


def _lines(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8", errors="replace") as file:
        yield from (line for line in file if line.strip())


def _is_whole(record: StepRecord) -> bool:
    """Whether every field is of its type: a file of that name may be of another program."""
    numbers: list[Any] = [record.time, *record.values.values()]
    for table in (*record.stream.values(), *record.weights.values()):
        numbers += table.values()
    for layer in record.layers:
        for heads in layer.figures.values():
            numbers += heads
    names = (record.non_finite, *(layer.module for layer in record.layers))
    return (
        isinstance(record.step, int)
        and all(isinstance(number, (int, float)) for number in numbers)
        and all(isinstance(name, str) for name in names)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else (None if math.isnan(value) else str(value))
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value


def _numbers(value: Any) -> Any:
    if value is None:
        return math.nan
    if value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: _numbers(each) for key, each in value.items()}
    return [_numbers(each) for each in value] if isinstance(value, list) else value
