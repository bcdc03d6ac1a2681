"""What lies on disk, checked before a weight is read: missing, truncated, pickled, foreign.

Only headers are read here (a few kilobytes), so a bad folder is refused in milliseconds.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, Final

from headwise.errors import ModelError
from headwise.observation.gguf_header import GgufHeader, read_gguf_header

__all__ = ["check_gguf", "check_weights", "is_gguf", "read_config"]

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
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{path} is not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from None
    except UnicodeDecodeError as error:
        raise ModelError(f"{path} is not UTF-8 (byte {error.start})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__} where a JSON object is expected")
    return config


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
        _check_safetensors(file)
    return files


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ModelError(f"{index} does not hold a weight map", to_do=_AGAIN) from None
    inside = [name for name in names if Path(name).name == name]
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
    return ModelError(f"{folder} has a config.json but no weights", allowed=_FORMATS)


def _check_safetensors(path: Path) -> None:
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
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise ModelError(f"the header of {path} cannot be read", to_do=_AGAIN) from None
    declared = 8 + length + max(ends, default=0)
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


def check_gguf(path: Path) -> GgufHeader:
    """The header of a GGUF file that is whole and of a family that transformers can load."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise _pointer(path)
    header = read_gguf_header(path)
    families = _gguf_families()
    if _family(header.family) not in families:
        raise ModelError(
            f"{path} is a GGUF file of the family {header.family!r}, which transformers cannot"
            " load",
            allowed=", ".join(sorted(families)),
            to_do="use the model's Hugging Face folder",
        )
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


def _gguf_families() -> set[str]:
    from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return (set(GGUF_SUPPORTED_ARCHITECTURES) | set(GGUF_CONFIG_ARCHS)) - {"general", "tokenizer"}


def _family(architecture: str) -> str:
    """A GGUF family under transformers' name for it."""
    renamed = {"qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "t5encoder": "t5"}
    return renamed.get(architecture, architecture.replace("-", "_"))
