"""Headwise's own models, loaded and described for measuring, without transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from headwise.errors import OptionError, ResourceError
from headwise.models import Model
from headwise.models.checkpoints import load
from headwise.models.embedded import is_embedded
from headwise.observation.loaded import LoadedModel, described
from headwise.observation.reading import EMBEDDED
from headwise.observation.tokenizer import decoding
from headwise.positions import LearnedPositions

__all__ = ["load_own", "own_folder", "wrap_own"]


def own_folder(path: str | Path) -> Path | None:
    """The folder, if the path names one in Headwise's own format."""
    folder = Path(path).expanduser()
    return folder if (folder / "architecture.json").is_file() else None


def load_own(folder: Path, *, dtype: torch.dtype | None, device: str) -> LoadedModel:
    """The model of a folder that ``headwise.models.checkpoints.save`` wrote."""
    if device == "auto":
        raise OptionError(
            "--device is 'auto', but Headwise's own models stay on one device",
            allowed="cpu, cuda, cuda:N, mps",
        )
    try:
        found = load(folder, dtype=dtype, device=device)
    except (MemoryError, torch.OutOfMemoryError):
        raise ResourceError(
            f"not enough memory on {device} for the weights of {folder}",
            to_do="lower --dtype to bfloat16, or take another --device",
        ) from None
    inside = is_embedded(folder)
    notes = () if found.tokenizer is not None else (f"{folder} has no tokenizer",)
    return wrap_own(
        found.model,
        found.tokenizer,
        name=EMBEDDED if inside else folder.resolve().name,
        path=str(folder),
        notes=notes,
    )


def wrap_own(
    model: Model, tokenizer: Any, *, name: str | None, path: str, notes: tuple[str, ...]
) -> LoadedModel:
    """A model in memory, described in the same way as a loaded one."""
    architecture = model.architecture
    learned = isinstance(model.embedding.positions, LearnedPositions)
    return described(
        model,
        tokenizer=decoding(tokenizer),
        name=name or type(model).__name__,
        architecture=architecture.family,
        context=architecture.context,
        path=path,
        kind=architecture.kind,
        position_limit=architecture.context if learned else None,
        notes=notes,
    )
