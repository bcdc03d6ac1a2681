"""The exceptions of Headwise, all in one tree.

    HeadwiseError
    ├── InputError (also a ValueError)   what was asked for cannot be done; nothing was computed
    │   ├── OptionError                  an argument has a value that is not allowed
    │   ├── ShapeError                   tensors whose shapes or dtypes do not fit together
    │   ├── TextError                    the text is missing, empty, too short or not UTF-8
    │   ├── ModelError                   the model cannot be found, read, or measured
    │   └── FileError                    a file cannot be read or written
    ├── MeasurementError                 the run did not give what it had to (also a RuntimeError)
    │   └── NonFiniteError               a NaN or infinity, named by module
    └── ResourceError                    out of memory or disk, and the setting that lowers the need

Every error is one line that answers four questions: what was asked, what was found, what is
allowed, what to do. The command line prints that line and exits with code 2.
"""

from __future__ import annotations

__all__ = [
    "FileError",
    "HeadwiseError",
    "InputError",
    "MeasurementError",
    "ModelError",
    "NonFiniteError",
    "OptionError",
    "ResourceError",
    "ShapeError",
    "TextError",
]


class HeadwiseError(Exception):
    """One line: what was asked and found; then, where they help, what is allowed and what to do.

    Example:
        >>> print(OptionError("--rows is 0", allowed="1 or more", to_do="leave it out for all"))
        --rows is 0; allowed: 1 or more; leave it out for all
    """

    def __init__(self, found: str, *, allowed: str | None = None, to_do: str | None = None) -> None:
        parts = [found]
        if allowed is not None:
            parts.append(f"allowed: {allowed}")
        if to_do is not None:
            parts.append(to_do)
        super().__init__("; ".join(" ".join(part.split()) for part in parts))


class InputError(HeadwiseError, ValueError):
    """What was asked for cannot be done; said before anything is computed."""


class OptionError(InputError):
    """An argument has a value that is not allowed."""


class ShapeError(InputError):
    """Tensors whose shapes or dtypes do not fit together."""


class TextError(InputError):
    """The text is missing, empty, too short or not UTF-8."""


class ModelError(InputError):
    """The model cannot be found, read, or measured."""


class FileError(InputError):
    """A file cannot be read or written."""


class MeasurementError(HeadwiseError, RuntimeError):
    """The run did not produce what it had to."""


class NonFiniteError(MeasurementError):
    """A NaN or an infinity appeared; the message names the module."""


class ResourceError(HeadwiseError, RuntimeError):
    """Out of memory or disk; the message names the setting that lowers the need."""
