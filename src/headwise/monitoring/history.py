"""The last records of a run as arrays: what trends are read from."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from headwise.monitoring.record import StepRecord

__all__ = ["History", "Numbers", "block_of", "straight", "typical"]

Numbers = NDArray[np.float64]

_FIGURES: Final = ("max_logit", "entropy_without_sink_fraction", "dead_rows_not_sink")
_NUMBER: Final = re.compile(r"(?:^|\.)\d+(?=\.|$)")
_SKIPPED: Final = ("bias", "expert")  # near zero by nature: key biases, experts not chosen


class History:
    """The last ``window`` records; everything that an alarm looks at.

    Attributes:
        records: the last ones, the newest last. ``count``: how many there have been.
        places: (module, head) of every column of ``heads``.
        peaks: figure → the highest value so far, by place.
        sizes: entries of each weight, where they are known.

    Example:
        >>> history = History()
        >>> history.add(StepRecord(step=1, time=0.0, layers=(), stream={}, values={},
        ...                        weights={"a": {"gradient": 2.0}}, non_finite=""))
        >>> history.count, history.weight("a", "gradient").tolist()
        (1, [2.0])
    """

    def __init__(self, window: int = 20, sizes: Mapping[str, int] | None = None) -> None:
        self.records: deque[StepRecord] = deque(maxlen=window)
        self.count = 0
        self.places: list[tuple[str, int]] = []
        self.peaks: dict[str, Numbers] = {}
        self.sizes = dict(sizes or {})
        self._heads: deque[dict[str, Numbers]] = deque(maxlen=window)
        self._columns: dict[str, slice] = {}

    @property
    def last(self) -> StepRecord:
        """The newest record."""
        return self.records[-1]

    @property
    def steps(self) -> Numbers:
        """Steps of the records that are held."""
        return np.array([record.step for record in self.records], dtype=np.float64)

    def add(self, record: StepRecord) -> None:
        """Take in one more record."""
        self.count += 1
        self.records.append(record)
        for layer in record.layers:
            if layer.module not in self._columns:
                heads = max(map(len, layer.figures.values()), default=0)
                start = len(self.places)
                self._columns[layer.module] = slice(start, start + heads)
                self.places += [(layer.module, head) for head in range(heads)]
        row = {name: np.full(len(self.places), math.nan) for name in _FIGURES}
        for layer in record.layers:
            at = self._columns[layer.module]
            for name in _FIGURES:
                # Another number of heads is that of another model: nothing to compare.
                values = layer.figures.get(name, [])
                if len(values) == at.stop - at.start:
                    row[name][at] = values
        self._heads.append(row)
        for name in _FIGURES:
            before = self._padded(self.peaks.get(name, np.zeros(0)))
            self.peaks[name] = np.fmax(before, row[name])

    def heads(self, figure: str) -> Numbers:
        """``record place``; NaN where a module was not seen."""
        return np.stack([self._padded(row[figure]) for row in self._heads])

    def weight(self, name: str, figure: str) -> Numbers:
        """One figure of one weight, by record; NaN where there is none."""
        return np.array(
            [record.weights.get(name, {}).get(figure, math.nan) for record in self.records]
        )

    def rms(self, block: str) -> Numbers:
        """rms of the stream after a block, without first tokens, by record."""
        found = [record.stream.get(block, {}).get("rms", math.nan) for record in self.records]
        return np.array(found)

    def matrices(self) -> list[str]:
        """Weights of the newest record that are compared: no biases, no experts of a router."""
        return [n for n in self.last.weights if not any(word in n for word in _SKIPPED)]

    def groups(self) -> list[list[str]]:
        """The same weight in all blocks, for each weight of which there are two or more."""
        found: dict[str, list[str]] = {}
        for name in self.matrices():
            if _NUMBER.search(name):
                found.setdefault(_NUMBER.sub(".#", name, count=1), []).append(name)
        return [names for names in found.values() if len(names) > 1]

    def _padded(self, row: Numbers) -> Numbers:
        missing = len(self.places) - len(row)
        return np.concatenate([row, np.full(missing, math.nan)]) if missing else row


def block_of(name: str) -> str:
    """The block that a weight is in.

    Example:
        >>> block_of("decoder.blocks.3.attention.branch.query.weight")
        'decoder.blocks.3'
    """
    found = _NUMBER.search(name)
    return name if found is None else name[: found.end()]


def straight(steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    """Slope and r² of the line of least squares, for each column of ``record place``.

    NaN where a value is not finite, r² also where nothing changes.

    Example:
        >>> slope, fit = straight(np.array([0.0, 1.0, 2.0]), np.array([[1.0], [3.0], [5.0]]))
        >>> slope.tolist(), fit.tolist()
        ([2.0], [1.0])
    """
    x = steps - steps.mean()
    whole = np.isfinite(values).all(0)
    y = np.where(whole, values, 0.0)
    y = y - y.mean(0)
    slope = (x @ y) / (x @ x)
    total = np.square(y).sum(0)
    left = np.square(y - x[:, None] * slope).sum(0)
    fit = np.where(total > 0, 1 - left / np.where(total > 0, total, 1.0), math.nan)
    return np.where(whole, slope, math.nan), np.where(whole, fit, math.nan)


def typical(values: Any) -> float:
    """The median of the finite ones; NaN where there is none."""
    numbers = np.asarray(values, dtype=np.float64)
    numbers = numbers[np.isfinite(numbers)]
    return float(np.median(numbers)) if numbers.size else math.nan
