"""Where the small trained model that ships inside the package lies."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from headwise.errors import ModelError

__all__ = ["embedded_folder", "embedded_model", "is_embedded"]


def embedded_folder() -> Path:
    """Where the model inside the package lies, if this installation has one."""
    return Path(str(importlib.resources.files("headwise") / "data" / "model"))


def is_embedded(folder: Path) -> bool:
    """Whether a folder is that of the model inside the package.

    Its weights are float16 to be small; they are computed in float32 unless a dtype is asked for.
    """
    return folder.resolve() == embedded_folder().resolve()


def embedded_model() -> Path:
    """The checkpoint folder of the model inside the package.

    Raises:
        ModelError: this installation has none.
    """
    folder = embedded_folder()
    if not (folder / "architecture.json").is_file():
        raise ModelError(
            "this installation of Headwise holds no model of its own",
            allowed="the name of a MODEL",
            to_do="name one, or install the released package, which brings a small trained model",
        )
    return folder
