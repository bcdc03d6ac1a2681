"""The text that a scan reads, as a string: a file, standard input, or what ships with the package.

Nothing here loads torch, so that a bad text is refused at once.
"""

from __future__ import annotations

import importlib.resources
import sys
from pathlib import Path
from typing import Final

from headwise.errors import TextError

__all__ = ["EMBEDDED", "default_text", "read_text"]

# What the model inside the package is called in results and in the name of its page.
EMBEDDED: Final = "embedded model"


def read_text(source: str | Path) -> str:
    """The text of a UTF-8 file, or of standard input when the source is ``-``.

    Raises:
        TextError: no such file, unreadable, empty, or not UTF-8 (with the position).

    Example:
        >>> read_text("/no/such/file.txt")
        Traceback (most recent call last):
            ...
        headwise.errors.TextError: there is no text file /no/such/file.txt
    """
    name = "standard input" if str(source) == "-" else str(source)
    try:
        if str(source) == "-":
            data = sys.stdin.buffer.read()
        else:
            data = Path(source).expanduser().read_bytes()
    except FileNotFoundError:
        raise TextError(f"there is no text file {name}") from None
    except OSError as error:
        reason = str(error.strerror).lower()
        raise TextError(f"cannot read the text {name}: {reason}") from None
    text = _decoded(name, data)
    if not text.strip():
        raise TextError(f"the text {name} is empty", to_do="name a file with text in it")
    return text


def default_text() -> str:
    """The text that ships with the package: *Hamlet*, acts I to III (public domain).

    Example:
        >>> default_text().splitlines()[0]
        'HAMLET, PRINCE OF DENMARK'
    """
    file = importlib.resources.files("headwise") / "data" / "hamlet.txt"
    return file.read_text(encoding="utf-8")


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TextError(
            f"the text {name} is not UTF-8: byte 0x{data[error.start]:02x} at position"
            f" {error.start:,} (line {line:,})",
            to_do="convert it first, for example: iconv -f LATIN1 -t UTF-8",
        ) from None
