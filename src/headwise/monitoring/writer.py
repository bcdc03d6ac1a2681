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
    """Appends records to ``health.jsonl``, after those that a folder has up to a step.

    A run that goes on from step s makes the records after s again; the old ones are dropped, and
    so is a last line that was cut off. ``before`` holds what was kept.

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

    def __init__(self, folder: Path, about: dict[str, Any], step: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with whole(folder / ABOUT) as temporary:
            temporary.write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
        self._path = folder / RECORDS
        self.before = _up_to(step, self._path)
        with whole(self._path) as temporary:
            lines = "".join(record.to_json() + "\n" for record in self.before)
            temporary.write_text(lines, encoding="utf-8")
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


def _up_to(step: int, path: Path) -> list[StepRecord]:
    if not step or not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(StepRecord.from_json(line))
        except (ValueError, KeyError, TypeError):
            continue  # the crash that ended the run cut it off
    return [record for record in found if record.step <= step]
