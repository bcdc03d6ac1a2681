"""The records of a run that still goes on: what is new since one last looked."""

from __future__ import annotations

from pathlib import Path

from headwise.errors import FileError
from headwise.monitoring.record import RECORDS, StepRecord

__all__ = ["Tail"]


class Tail:
    """Reads the lines that were added to ``health.jsonl`` since the last look, whole ones alone.

    Raises:
        FileError: there is no such folder. A folder without records is one to wait for.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> tail = Tail(folder)
        >>> tail.new()
        ()
        >>> record = StepRecord(step=1, time=0.0, layers=(), stream={}, weights={},
        ...                     non_finite="", values={})
        >>> _ = (folder / "health.jsonl").write_text(record.to_json() + "\\n{\\"step")
        >>> [each.step for each in tail.new()], tail.new()
        ([1], ())
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        if not self.folder.is_dir():
            raise FileError(f"{self.folder} is no folder", allowed="the folder of a run")
        self.started = 0  # times that the file has become shorter: the run began anew
        self._read = 0

    def new(self) -> tuple[StepRecord, ...]:
        """Records that are whole and were not there before, in the order of the file."""
        path = self.folder / RECORDS
        if not path.is_file():
            return ()
        if path.stat().st_size < self._read:
            self._read = 0
            self.started += 1
        with path.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self._read += end
        found = []
        for line in text[:end].splitlines():
            try:
                found.append(StepRecord.from_json(line.decode("utf-8")))
            except (ValueError, KeyError, TypeError, AttributeError):
                continue  # what a crash left half-written; read_run tells of it
        return tuple(found)
