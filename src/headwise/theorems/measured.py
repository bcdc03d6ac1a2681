"""One number that was measured, and how far from its prediction it may be.

    exact      an identity: |value − predicted| ≤ tolerance, derived from rounding
    estimate   an expectation: z = (value − predicted) / error; fails at |z| > 4, warns at 3
    within     a regularity: the interval over draws lies inside a stated range

The error of an estimate comes from independent draws of weights or of sequences, never from the n²
entries of one matrix. Among a hundred estimates, |z| > 4 is a false alarm in 0.6 % of runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch

__all__ = ["Measured", "bootstrap", "estimate", "exact", "mean_estimate", "slope", "within"]

D = TypeVar("D")

_FAIL: Final = 4.0
_WARN: Final = 3.0
_FEWEST: Final = 8  # draws behind an estimate
_LEVEL: Final = 0.99  # of bootstrap intervals


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A number with its prediction and what may lie between them.

    Attributes:
        predicted: None where a range is predicted.
        tolerance: of an identity. ``error``: standard error of an estimate.
        interval: of the value, over draws. ``allowed``: the range that must hold it.
        draws: independent draws behind it.
    """

    name: str
    value: float
    predicted: float | None = None
    tolerance: float | None = None
    error: float | None = None
    interval: tuple[float, float] | None = None
    allowed: tuple[float, float] | None = None
    draws: int = 1
    unit: str = ""

    @property
    def z(self) -> float | None:
        """Standard errors from the prediction; None where there is no standard error."""
        if self.error is None or self.predicted is None:
            return None
        difference = self.value - self.predicted
        if self.error > 0:
            return difference / self.error
        return 0.0 if difference == 0 else math.copysign(math.inf, difference)

    @property
    def holds(self) -> bool:
        """Whether the measurement is what was predicted."""
        return self._judged() is True

    @property
    def failed(self) -> bool:
        """Whether it is surely something else."""
        return self._judged() is False

    @property
    def warns(self) -> bool:
        """Whether an estimate is between 3 and 4 standard errors away."""
        z = self.z
        return z is not None and _WARN < abs(z) <= _FAIL

    def _judged(self) -> bool | None:
        """True, False, or None where it cannot be said."""
        if math.isnan(self.value):
            return False
        if self.allowed is not None:
            low, high = self.interval or (self.value, self.value)
            inside = self.allowed[0] <= low and high <= self.allowed[1]
            outside = high < self.allowed[0] or low > self.allowed[1]
            return True if inside else False if outside else None
        assert self.predicted is not None
        if self.tolerance is not None:
            return abs(self.value - self.predicted) <= self.tolerance
        z = self.z
        assert z is not None
        if self.draws < _FEWEST or math.isnan(z):
            return None
        return abs(z) <= _FAIL


def exact(
    name: str, value: float, *, tolerance: float, predicted: float = 0.0, draws: int = 1
) -> Measured:
    """An identity: the value is the prediction up to rounding.

    Example:
        >>> exact("largest |Σ a − 1|", 3e-7, tolerance=1e-6).holds
        True
    """
    return Measured(
        name=name, value=float(value), predicted=predicted, tolerance=tolerance, draws=draws
    )


def estimate(
    name: str, value: float, *, predicted: float, error: float, draws: int, unit: str = ""
) -> Measured:
    """An expectation: the value is the prediction up to four standard errors.

    Example:
        >>> estimate("variance", 1.02, predicted=1.0, error=0.01, draws=100).z
        2.0000000000000018
    """
    return Measured(
        name=name, value=float(value), predicted=float(predicted), error=float(error), draws=draws,
        unit=unit,
    )  # fmt: skip


def mean_estimate(
    name: str, values: Sequence[float] | torch.Tensor, *, predicted: float
) -> Measured:
    """The mean of independent draws, its standard error from their spread.

    Example:
        >>> mean_estimate("mean", [0.9, 1.1, 1.0, 1.0, 0.8, 1.2, 1.0, 1.0], predicted=1.0).holds
        True
    """
    numbers = [float(x) for x in values]
    spread = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan
    return estimate(
        name, statistics.fmean(numbers), predicted=predicted, error=spread, draws=len(numbers)
    )


def within(
    name: str,
    value: float,
    *,
    allowed: tuple[float, float],
    interval: tuple[float, float] | None = None,
    draws: int = 1,
    unit: str = "",
) -> Measured:
    """A regularity: the interval of the value (or the value itself) lies in the allowed range.

    Example:
        >>> within("slope", -0.56, allowed=(-0.65, -0.35), interval=(-0.6, -0.5), draws=8).holds
        True
    """
    return Measured(
        name=name, value=float(value), allowed=allowed, interval=interval, draws=draws, unit=unit
    )


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least-squares slope of log y on log x.

    Example:
        >>> round(slope([1, 2, 4], [3, 6, 12]), 9)
        1.0
    """
    a, b = [math.log(v) for v in x], [math.log(v) for v in y]
    return statistics.linear_regression(a, b).slope


def bootstrap(
    draws: Sequence[D], of: Callable[[list[D]], float], *, seed: int = 0, repeats: int = 2000
) -> tuple[float, float]:
    """The 99 % interval of a statistic over draws: whole draws are resampled, with replacement.

    ``of`` takes a list of draws and gives a number.

    Example:
        >>> low, high = bootstrap([[1.0], [2.0], [3.0]] * 5, lambda d: sum(x[0] for x in d) / 15)
        >>> 1.2 < low < 2.0 < high < 2.8
        True
    """
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(draws), (repeats, len(draws)), generator=generator).tolist()
    found = sorted(float(of([draws[i] for i in pick])) for pick in picks)
    tail = (1 - _LEVEL) / 2
    return found[int(tail * repeats)], found[min(int((1 - tail) * repeats), repeats - 1)]
