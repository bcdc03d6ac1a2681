"""Event files for TensorBoard: of a training log, and of the records of a monitor."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from headwise.errors import OptionError
from headwise.monitoring.processes import speaks
from headwise.monitoring.record import StepRecord

__all__ = ["TensorBoardWriter", "event_writer"]

_LARGEST: Final = ("max_logit", "max_abs_logit", "qk_norm", "ov_norm")  # the rest: means


class TensorBoardWriter:
    """Writes the records of a monitor as scalars; give it to ``Monitor`` as ``on_record``.

    For every layer ``FIGURE/MODULE``: logits and spectral norms are the largest of the heads, the
    others the mean over heads. Also ``stream_FIGURE/BLOCK``, ``gradient/WEIGHT``,
    ``update/WEIGHT`` (relative to the weight), and what was logged, by its name. What is not
    finite is written as it is; of several processes, one writes.

    Args:
        folder: where the event files go.
        step: steps done before, of a run that goes on: later events there are hidden.

    Raises:
        OptionError: tensorboard is not installed.

    Example:
        >>> import tempfile
        >>> from headwise.monitoring.record import StepRecord
        >>> write = TensorBoardWriter(tempfile.mkdtemp())
        >>> write(StepRecord(step=1, time=0.0, layers=(), stream={}, weights={}, non_finite="",
        ...                  values={"loss": 2.5}))
        >>> write.close()
    """

    def __init__(self, folder: str | Path, *, step: int = 0) -> None:
        self._events = event_writer(Path(folder), step) if speaks() else None

    def __call__(self, record: StepRecord) -> None:
        """Write one record."""
        if self._events is None:
            return
        for name, value in _scalars(record):
            self._events.add_scalar(name, value, record.step)
        if record.non_finite:
            self._events.add_text("non_finite", record.non_finite, record.step)
        self._events.flush()

    def close(self) -> None:
        """Close the files."""
        if self._events is not None:
            self._events.close()


def event_writer(folder: Path, step: int = 0) -> Any:
    """A writer of event files, for a run that goes on from a step.

    Raises:
        OptionError: tensorboard is not installed.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise OptionError(
            "TensorBoard logs were asked for and tensorboard is not installed",
            to_do="pip install 'headwise[tensorboard]', or leave them out",
        )
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=step + 1 if step else None)


def _scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    for layer in record.layers:
        for figure, values in layer.figures.items():
            value = _of_heads(values, largest=figure in _LARGEST)
            yield f"{figure}/{layer.module}", value
    for block, figures in record.stream.items():
        for figure, value in figures.items():
            yield f"stream_{figure}/{block}", value
    for weight, norms in record.weights.items():
        yield f"gradient/{weight}", norms["gradient"]
        if norms["weight"]:
            yield f"update/{weight}", norms["update"] / norms["weight"]
    yield from record.values.items()


def _of_heads(values: Sequence[float], *, largest: bool) -> float:
    """Heads that saw nothing are NaN and are left out; what is infinite stays so."""
    seen = [value for value in values if not math.isnan(value)]
    if not seen:
        return math.nan
    return max(seen) if largest else sum(seen) / len(seen)
