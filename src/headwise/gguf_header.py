"""The header of a GGUF file: its metadata, its tensors, and how long the file has to be.

Read in milliseconds, before anything is dequantised. Layout: the four letters ``GGUF``, version
(uint32), tensor count and metadata count (uint64), the metadata, the tensor table, padding, data.
Source: the GGUF specification, github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headwise.errors import ModelError

__all__ = ["ArrayLength", "GgufHeader", "GgufTensor", "read_gguf_header"]

_VERSIONS: Final = (2, 3)
_SCALARS: Final = "BbHhIif?"  # the value types 0 to 7, as struct letters; 10, 11, 12 follow
_LETTERS: Final = {**dict(enumerate(_SCALARS)), 10: "Q", 11: "q", 12: "d"}
_STRING: Final = 8
_ARRAY: Final = 9


class ArrayLength(int):
    """The length of an array that was passed over."""


@dataclass(frozen=True)
class GgufTensor:
    """One line of the tensor table: the shape (outermost axis first) and where the data lie."""

    shape: tuple[int, ...]
    kind: int  # the number of a gguf.GGMLQuantizationType
    start: int  # byte of the file
    size: int  # bytes


@dataclass(frozen=True)
class GgufHeader:
    """What the header says; arrays of the metadata are kept as their lengths unless asked for."""

    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    declared_bytes: int

    @property
    def family(self) -> str:
        """The value of ``general.architecture``."""
        return str(self.metadata.get("general.architecture", ""))


class _Cursor:
    def __init__(self, data: mmap.mmap, arrays: bool) -> None:
        self.data = data
        self.arrays = arrays
        self.at = 4

    def number(self, letter: str) -> Any:
        (value,) = struct.unpack_from("<" + letter, self.data, self.at)
        self.at += struct.calcsize("<" + letter)
        return value

    def skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self.data):
            raise ValueError("it ends inside the header")

    def string(self) -> str:
        length, start = self.number("Q"), self.at
        self.skip(length)
        return self.data[start : self.at].decode("utf-8")

    def value(self) -> Any:
        kind = self.number("I")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_LETTERS[kind])
        kind, count = self.number("I"), self.number("Q")
        if self.arrays:
            return self.array(kind, count)
        return ArrayLength(self.skipped(kind, count))

    def array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        letters = f"<{count}{_LETTERS[kind]}"
        values = struct.unpack_from(letters, self.data, self.at)
        self.at += struct.calcsize(letters)
        return list(values)

    def skipped(self, kind: int, count: int) -> int:
        if kind == _STRING:
            for _ in range(count):
                self.skip(self.number("Q"))
        else:
            self.skip(count * struct.calcsize("<" + _LETTERS[kind]))
        return count


def read_gguf_header(path: Path, *, arrays: bool = False) -> GgufHeader:
    """The header of the file; a ModelError says when it is foreign, truncated or corrupt.

    ``arrays``: also read the arrays of the metadata, which are the vocabulary and its merges.
    """
    with path.open("rb") as file:
        start = file.read(8)
        if not start.startswith(b"GGUF"):
            raise ModelError(f"{path} is not a GGUF file: it does not start with the letters GGUF")
        if len(start) < 8:
            raise ModelError(f"{path} is truncated: it has {len(start)} bytes")
        version = struct.unpack("<I", start[4:])[0]
        if version not in _VERSIONS:
            raise ModelError(
                f"{path} is GGUF version {version}", allowed="versions 2 and 3, little-endian"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _read(_Cursor(data, arrays))
            except (ValueError, KeyError, struct.error, OverflowError) as error:
                short = isinstance(error, struct.error)
                reason = "it ends inside the header" if short else str(error)
                raise ModelError(
                    f"the header of {path} is truncated or corrupt ({reason})",
                    to_do="fetch the file again",
                ) from None


def _read(cursor: _Cursor) -> GgufHeader:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    cursor.number("I")  # the version
    tensors, entries = cursor.number("Q"), cursor.number("Q")
    metadata = {cursor.string(): cursor.value() for _ in range(entries)}
    found: dict[str, tuple[tuple[int, ...], int, int, int]] = {}
    for _ in range(tensors):
        name = cursor.string()
        shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
        kind = cursor.number("I")
        elements, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if name in found:
            raise ValueError(f"two tensors are called {name}")
        size = math.prod(shape) // elements * width
        found[name] = (shape, kind, cursor.number("Q"), size)
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    table = {
        name: GgufTensor(shape, kind, start + offset, size)
        for name, (shape, kind, offset, size) in found.items()
    }
    end = max((each.start + each.size for each in table.values()), default=start)
    return GgufHeader(metadata, table, end)
