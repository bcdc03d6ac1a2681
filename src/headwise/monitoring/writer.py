"""The folder of a run: facts once, then a line for every record. A full disk stops nothing."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from headwise.files import whole
from headwise.monitoring.record import ABOUT, RECORDS, StepRecord

__all__ = ["RunWriter"]


class RunWriter:
    """Appends records to ``health.jsonl``; a folder that has some goes on after them.

    Example:
        >>> import tempfile
        >>> from headwise.monitoring.record import read_run
        >>> folder = Path(tempfile.mkdtemp())
        >>> writer = RunWriter(folder, {"model": "tiny"})
        >>> writer.write(StepRecord(step=1, time=0.0, layers=(), stream={}, weights={},
        ...                         non_finite="", values={"loss": 2.5}))
        >>> writer.close()
        >>> read_run(folder).records[0].values
        {'loss': 2.5}
    """

    def __init__(self, folder: Path, about: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / ABOUT) as temporary:
            temporary.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self._path = folder / RECORDS
        self._file: Any = self._path.open("a", encoding="utf-8")
        self._told = False

    def write(self, record: StepRecord) -> None:
        """One line; where the disk is full, one warning and training goes on."""
        try:
            self._file.write(record.to_json() + "\n")
            self._file.flush()
        except (OSError, ValueError) as error:
            if not self._told:
                self._told = True
                reason = getattr(error, "strerror", None) or error
                warnings.warn(
                    f"records are no longer written to {self._path}: {reason}", stacklevel=2
                )

    def close(self) -> None:
        """Close the file; what is written stays."""
        try:
            self._file.close()
        except OSError:
            return
