"""Headwise's own format: what a model is made of, its weights, and its tokenizer if it has one.

    architecture.json   the ``Architecture``
    model.safetensors   every parameter under its name in the model
    tokenizer.json      of the ``tokenizers`` library

A model that is saved and loaded is the same, bit for bit, in every type.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer

from headwise.errors import ModelError
from headwise.models.architecture import Architecture
from headwise.models.build import Model, skeleton
from headwise.models.checkpoints.checks import listed
from headwise.models.checkpoints.files import TensorFiles, write_folder
from headwise.models.checkpoints.filling import fill

__all__ = ["ARCHITECTURE", "FILES", "read_own", "save"]

ARCHITECTURE: Final = "architecture.json"
FILES: Final = frozenset((ARCHITECTURE, "model.safetensors", "tokenizer.json"))


def save(model: Model, path: str | Path, tokenizer: Tokenizer | None = None) -> Path:
    """Write a model as a folder, whole or not at all; an older one at the path is replaced.

    Raises:
        FileError: the folder cannot be written, or holds files that are not of this format.
        ModelError: the parameters are not those of the model's architecture, such as those of
            adapters: what was written could not be read again.

    Example:
        >>> import tempfile
        >>> from headwise.models import build, preset
        >>> folder = save(build(preset("tiny")), Path(tempfile.mkdtemp()) / "tiny")
        >>> sorted(file.name for file in folder.iterdir())
        ['architecture.json', 'model.safetensors']
    """
    _check_parameters(model)
    documents = {ARCHITECTURE: model.architecture.model_dump_json(indent=2) + "\n"}
    if tokenizer is not None:
        documents["tokenizer.json"] = tokenizer.to_str(pretty=True)
    return write_folder(path, dict(model.named_parameters()), documents, replaces=FILES)


def _check_parameters(model: Model) -> None:
    wanted = {name: p.shape for name, p in skeleton(model.architecture).named_parameters()}
    found = {name: p.shape for name, p in model.named_parameters()}
    odd = [name for name in {**found, **wanted} if found.get(name) != wanted.get(name)]
    if odd:
        raise ModelError(
            f"the model's parameters are not those of its architecture: {listed(odd)}",
            to_do="take adapters away first (remove_low_rank, with keep_merged to keep the change)",
        )


def read_own(
    folder: Path, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Model:
    """The model of a folder that ``save`` wrote, in evaluation mode.

    Raises:
        ModelError: a file is missing or broken, or the tensors are not those of the architecture.
    """
    path = folder / ARCHITECTURE
    try:
        architecture = Architecture.from_json(path.read_bytes())
    except (OSError, ModelError) as error:
        raise ModelError(f"{path} cannot be used: {error}", to_do="save the model again") from None
    model = skeleton(architecture)
    fill(
        model,
        TensorFiles.open(folder),
        dtype=dtype,
        device="cpu" if device is None else device,
        source=str(folder),
    )
    return model.eval()
