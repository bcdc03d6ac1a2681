"""The tensors of a checkpoint folder: opened without reading, read one at a time, written whole.

    files = TensorFiles.open(folder)          names and shapes, from the headers
    files.read(name)                          one tensor
    write_folder(folder, tensors, documents)  model.safetensors and JSON, whole or not at all

Format: safetensors (github.com/huggingface/safetensors), one file or shards with an index.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headwise.errors import FileError, ModelError
from headwise.files import whole_folder
from headwise.models.checkpoints.checks import check_safetensors, check_weights, listed, read_json

__all__ = ["CHECKPOINT_FILES", "TensorFiles", "write_folder"]

# What a folder may hold that a checkpoint written to the same place takes away.
CHECKPOINT_FILES: Final = frozenset(
    ("architecture.json", "config.json", "model.safetensors", "tokenizer.json")
)
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class TensorFiles(Mapping[str, Callable[[], Tensor]]):
    """The tensors of one or more safetensors files: a mapping from each name to its reader.

    Example:
        >>> import tempfile
        >>> folder = write_folder(
        ...     Path(tempfile.mkdtemp()) / "model", {"norm.weight": torch.ones(3)}, {}
        ... )
        >>> files = TensorFiles.open(folder)
        >>> files.shape("norm.weight"), files["norm.weight"]()
        ((3,), tensor([1., 1., 1.]))
    """

    def __init__(self, path: Path, opened: Mapping[Path, Any], where: Mapping[str, Path]) -> None:
        self.path = path
        self._opened = opened
        self._where = where

    @classmethod
    def open(cls, path: str | Path) -> TensorFiles:
        """A folder with model.safetensors or shards and their index, or one safetensors file.

        Raises:
            ModelError: a file is missing, truncated, corrupt or a pickle, the index names a tensor
                that is not in its shard, or two shards hold one name.
        """
        here = Path(path).expanduser()
        if here.is_dir():
            files = check_weights(here)
        elif here.is_file():
            check_safetensors(here)
            files = (here,)
        else:
            raise ModelError(f"there is no file or folder {here}")
        opened: dict[Path, Any] = {}
        where: dict[str, Path] = {}
        for file in files:
            opened[file] = _open(file)
            for name in opened[file].keys():  # noqa: SIM118, it is no dictionary
                if name in where:
                    raise ModelError(
                        f"{where[name].name} and {file.name} in {here} both hold {name}",
                        to_do="fetch the files of one checkpoint only",
                    )
                where[name] = file
        index = here / "model.safetensors.index.json"
        if index.is_file():
            _check_index(index, where)
        return cls(here, opened, where)

    def __getitem__(self, name: str) -> Callable[[], Tensor]:
        if name not in self._where:
            raise KeyError(name)
        return partial(self.read, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor, from the header."""
        word = self._slice(name).get_dtype()
        if word not in _DTYPES:
            raise ModelError(f"{name} in {self._where[name]} has the type {word}")
        return _DTYPES[word]

    def read(self, name: str) -> Tensor:
        """One tensor, read from its file."""
        try:
            tensor: Tensor = self._opened[self._located(name)].get_tensor(name)
        except SafetensorError as error:
            raise _corrupt(self._where[name], error) from None
        return tensor

    def config(self, name: str = "config.json") -> dict[str, Any]:
        """A JSON file of the folder, as a dictionary."""
        return read_json(self.path / name)

    def _slice(self, name: str) -> Any:
        return self._opened[self._located(name)].get_slice(name)

    def _located(self, name: str) -> Path:
        if name not in self._where:
            raise ModelError(f"{self.path} has no tensor {name}", allowed=listed(self._where))
        return self._where[name]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise _corrupt(file, error) from None


def _corrupt(file: Path, error: SafetensorError) -> ModelError:
    return ModelError(f"{file} is corrupt ({error})", to_do="fetch the file again")


def _check_index(index: Path, where: Mapping[str, Path]) -> None:
    named = read_json(index)["weight_map"]
    wrong = [name for name, file in named.items() if name not in where or where[name].name != file]
    if wrong:
        raise ModelError(
            f"{index} names tensors that are not where it says: "
            + listed(f"{name} in {named[name]}" for name in wrong),
            to_do="fetch the files of one checkpoint only",
        )


def write_folder(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    documents: Mapping[str, Any],
    *,
    replaces: Collection[str] = CHECKPOINT_FILES,
) -> Path:
    """Write model.safetensors and JSON documents (by file name) as one folder, or nothing of it.

    A document is a JSON value, or text that is JSON already. An older checkpoint at the path stays
    whole until the new one is on the disk: a full disk or a crash leaves it as it was.

    Raises:
        FileError: the folder cannot be written, or holds files that are not of a checkpoint.
        ModelError: two names share the memory of one tensor; nothing was written.
    """
    _check_distinct(tensors)
    kept = {name: _alone(tensor.detach()) for name, tensor in tensors.items()}
    with whole_folder(path, replaces={*replaces, *documents}) as temporary:
        try:
            save_file(kept, temporary / "model.safetensors", metadata={"format": "pt"})
        except SafetensorError as error:
            raise FileError(f"cannot write {Path(path)}: {_io_reason(error)}") from None
        for name, document in documents.items():
            text = document if isinstance(document, str) else json.dumps(document, indent=2)
            (temporary / name).write_text(text, encoding="utf-8")
    return Path(path).expanduser()


def _io_reason(error: SafetensorError) -> str:
    """The system's words for the error, where it came from the system."""
    number = re.search(r"\(os error (\d+)\)", str(error))
    return os.strerror(int(number[1])).lower() if number else str(error)


def _check_distinct(tensors: Mapping[str, Tensor]) -> None:
    seen: dict[tuple[object, ...], str] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ModelError(f"{name} holds no numbers: the model was never filled")
        place = tensor.data_ptr(), tensor.shape, tensor.device
        if tensor.numel() and seen.setdefault(place, name) != name:
            raise ModelError(
                f"{seen[place]} and {name} are one tensor", to_do="write it under one name"
            )


def _alone(tensor: Tensor) -> Tensor:
    """A contiguous tensor that is all of its memory, as the format asks."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
