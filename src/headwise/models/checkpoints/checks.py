"""Checkpoints on disk, checked before a weight is read: missing, truncated, pickled, foreign.

Only headers are read here (a few kilobytes), so a bad folder is refused in milliseconds.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from headwise.errors import ModelError
from headwise.gguf_header import GgufHeader, read_gguf_header

__all__ = [
    "check_gguf",
    "check_safetensors",
    "check_weights",
    "is_gguf",
    "listed",
    "read_config",
    "read_json",
]

_PICKLES: Final = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".h5", ".msgpack")
_POINTER: Final = b"version https://git-lfs"
_FORMATS: Final = "safetensors or GGUF"
_AGAIN: Final = "fetch the file again"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's ``config.json`` as a dictionary; a ModelError says what is wrong with it."""
    path = folder / "config.json"
    if not path.is_file():
        inside = sorted(p.name for p in folder.glob("*.gguf"))
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder",
            to_do=f"name the file itself: {folder / inside[0]}" if inside else None,
        )
    return read_json(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file that holds one JSON object, as a dictionary; a ModelError says what is wrong with it.

    Example:
        >>> read_json(Path("/no/such.json"))
        Traceback (most recent call last):
            ...
        headwise.errors.ModelError: there is no file /no/such.json
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"there is no file {path}") from None
    except OSError as error:
        raise ModelError(
            f"{path} cannot be read: {(error.strerror or str(error)).lower()}"
        ) from None
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 (byte {error.start})") from None
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds {type(content).__name__} where a JSON object is expected")
    return content


def listed(names: Iterable[str], most: int = 3) -> str:
    """The first names and how many more there are.

    Example:
        >>> listed(["a", "b", "c", "d", "e"])
        'a, b, c and 2 more'
    """
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def check_weights(folder: Path) -> tuple[Path, ...]:
    """The folder's weight files, each one whole; a ModelError names what is missing or broken."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = _shards(index)
    elif (folder / "model.safetensors").is_file():
        files = (folder / "model.safetensors",)
    else:
        raise _no_weights(folder)
    for file in files:
        check_safetensors(file)
    return files


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        inside = [name for name in names if Path(name).name == name]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ModelError(f"{index} does not hold a weight map", to_do=_AGAIN) from None
    if inside != names:
        raise ModelError(f"{index} names files outside its folder")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(
            f"{index.parent} lacks {missing[0]}{more} of its {len(names)} weight files",
            to_do="fetch the missing files",
        )
    return tuple(index.parent / name for name in names)


def _no_weights(folder: Path) -> ModelError:
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if pickled:
        return ModelError(
            f"{folder} has its weights only as {pickled[0]}, which can run code when it is opened",
            allowed=_FORMATS,
            to_do="fetch the model's safetensors files, or save it again with save_pretrained",
        )
    other = sorted(p.name for p in folder.glob("*.safetensors"))
    if other:
        return ModelError(
            f"{folder} has {other[0]} but neither model.safetensors nor"
            " model.safetensors.index.json",
            to_do="rename the file, or fetch the index",
        )
    return ModelError(f"{folder} has no weights", allowed=_FORMATS)


def check_safetensors(path: Path) -> None:
    """The file is exactly as long as its header says (8 bytes of length, the header, the data)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start + file.read(len(_POINTER) - 8) == _POINTER:
            raise _pointer(path)
        file.seek(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise ModelError(
                f"{path} is truncated or not safetensors: it has {size} bytes and declares a header"
                f" of {length}",
                to_do=_AGAIN,
            )
        try:
            header = json.loads(file.read(length))
            ends = [
                info["data_offsets"][1] for name, info in header.items() if name != "__metadata__"
            ]
            declared = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            raise ModelError(f"the header of {path} cannot be read", to_do=_AGAIN) from None
    if size != declared:
        state = "truncated" if size < declared else "too long"
        raise ModelError(
            f"{path} is {state}: its header declares {declared} bytes and it has {size}",
            to_do=_AGAIN,
        )


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF, by its name or by its first four bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def check_gguf(path: Path, *, arrays: bool = False) -> GgufHeader:
    """The header of a GGUF file that is whole; a ModelError says what is wrong with it."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise _pointer(path)
    header = read_gguf_header(path, arrays=arrays)
    size = path.stat().st_size
    if size < header.declared_bytes:
        raise ModelError(
            f"{path} is truncated: its header declares {header.declared_bytes} bytes and it has"
            f" {size}",
            to_do=_AGAIN,
        )
    return header


def _pointer(path: Path) -> ModelError:
    return ModelError(f"{path} is a Git LFS pointer, not the weights", to_do="run git lfs pull")
