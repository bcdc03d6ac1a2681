"""What a run says while it goes: one JSON object a line, and event files for TensorBoard."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from headwise.files import whole
from headwise.monitoring.tensorboard import event_writer

__all__ = ["EVENTS", "LOG", "Log", "read_log"]

EVENTS = "tensorboard"
LOG = "log.jsonl"


class Log:
    """Lines of ``log.jsonl``, each with its step; with ``tensorboard`` also event files.

    A log that is opened at step s drops the lines after s: a resumed run writes them again.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with Log(folder, step=0) as log:
        ...     log.write(1, loss=5.5)
        >>> read_log(folder)
        [{'step': 1, 'loss': 5.5}]
    """

    def __init__(self, folder: Path, *, step: int, tensorboard: bool = False) -> None:
        self._events = event_writer(folder / EVENTS, step) if tensorboard else None
        path = folder / LOG
        kept = [line for line in read_log(folder) if line["step"] <= step] if step else []
        with whole(path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, **values: float | int) -> None:
        """One line, and one scalar for each value."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in values.items():
                self._events.add_scalar(name, value, step)

    def flush(self) -> None:
        """Put what was written on the disk: before a checkpoint that counts on it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        if self._events is not None:
            self._events.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def read_log(folder: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's log; a last line that was cut off is left out."""
    path = Path(folder) / LOG
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines[:-1]]
